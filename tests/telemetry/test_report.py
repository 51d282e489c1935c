"""The page: complete, self-contained, and deaf to what models write."""

import base64
import hashlib
import json
import re
from datetime import datetime
from html.parser import HTMLParser

import pytest

from psrl.telemetry import names
from psrl.telemetry.report import write_report
from psrl.telemetry.report_charts import Chart, Series, chart_html, thinned, ticks
from psrl.telemetry.report_episodes import chosen_episodes, logprob_level
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trackers import TrackedRun, open_metric_log
from psrl.telemetry.trajectories import EpisodeRecord, TrajectoryWriter
from psrl.telemetry.val_accuracy import mean_at_n, pass_at
from psrl.types import Submission

HOSTILE = "</pre></title><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' ${x} $title \x00\u202e\ud800"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Elements, their attributes and the text of a page; refuses tags that do not close in order."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.open, self.words = [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def run_of(root, recipe, episode_of, *, text="What is 2+3?", with_tool=True, pieces=True):
    folder = RunFolder.create(root, recipe, datetime(2026, 3, 4, 5, 6, 7))
    folder.config.write_text(
        f"recipe: {recipe}\npsrl:\n  rollout_n: 8\n  staleness: {0 if with_tool else 1}\ndata: {{prompt_key: {json.dumps(text)}}}\n"
    )
    log = open_metric_log(["jsonl"], TrackedRun(folder=folder))
    writer = TrajectoryWriter(folder.trajectories)
    log.log({names.VAL_GREEDY_ACCURACY: 0.5, names.VAL_MEAN_AT_N_ACCURACY: 0.25}, step=0)
    for step in range(1, 6):
        shares = dict.fromkeys(names.TimeUse, 1 / len(names.TimeUse))
        log.log(
            {
                names.REWARD_MEAN: step / 5,
                names.TOOL_RATE: 0.2 * step * with_tool,
                names.STEP_SECONDS: 10.0,
                names.ERRORS_INFRA_RATE: 0.0,
                **{names.time_share(use): share for use, share in shares.items()},
            },
            step=step,
        )
        for index, reward in enumerate((1.0, -1.0)):
            uid, judged = f"train-{step}-{index}", {"reward": reward, "accuracy": float(reward > 0)}
            handed_in = Submission(exit_status=text, patch=text, text=text)
            episode = episode_of(uid, text=text, arguments={"code": text}, error=text, submission=handed_in, **judged)
            writer.write(episode, step=step, pieces=[[text, *"abcdefgh"]] if pieces else ())
    log.log({names.VAL_GREEDY_ACCURACY: 0.975, names.VAL_MEAN_AT_N_ACCURACY: 0.9375, names.VAL_SECONDS: 11.0}, step=5)
    log.close()
    writer.close()
    return folder


def test_the_page_draws_pass_at_k_and_data_sources_where_there_are_any(tmp_path, episode_of):
    folder = run_of(tmp_path, "retool", episode_of)
    assert "pass@k" not in Page(write_report(folder).read_text()).text
    log = open_metric_log(["jsonl"], TrackedRun(folder=folder))
    log.log({pass_at(8): 0.5, mean_at_n("aime_2024"): 0.25, pass_at(8, "aime_2024"): 0.5, mean_at_n("aime_2025"): 0.125}, step=6)
    log.close()
    text = Page(write_report(folder).read_text()).text
    assert "Validation pass@k" in text
    assert "Validation accuracy by data source" in text
    assert "aime_2024 mean@n" in text


def test_the_page_tells_before_and_after_time_and_steps(tmp_path, episode_of):
    page = Page(write_report(run_of(tmp_path, "retool_tiny", episode_of)).read_text())
    assert "Validation accuracy, greedy50% → 97.5%step 0 to 5" in page.text
    assert "Validation accuracy, mean@n25% → 93.8%step 0 to 5" in page.text
    # Five steps of 10 s and a validation of 11 s.
    assert "Time1:01" in page.text
    assert "Training steps5" in page.text
    assert "Zero at every step: infrastructure errors." in page.text
    assert "psrl.rollout_n8" in page.text


@pytest.mark.parametrize("pieces", [True, False])
def test_hostile_text_stays_text_everywhere(tmp_path, episode_of, pieces):
    folder = run_of(tmp_path, "retool_tiny", episode_of, text=HOSTILE, pieces=pieces)
    source = write_report(folder, decode=lambda ids: HOSTILE, labels=(HOSTILE, HOSTILE)).read_text()
    page = Page(source)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert [attributes for _, attributes in page.elements if any(name.startswith("on") for name in attributes)] == []
    assert page.text.count("<script>alert(1)</script>") > 10
    assert not {"\x00", "\u202e"} & set(source)


def test_the_page_loads_nothing_and_its_policy_allows_only_its_own_script(tmp_path, episode_of):
    source = write_report(run_of(tmp_path, "retool_tiny", episode_of)).read_text()
    page = Page(source)
    assert [tag for tag, attributes in page.elements if {"src", "href"} & set(attributes) or tag in ("link", "iframe", "object")] == []
    assert re.search(r"url\(|@import|https?://", source) is None
    policy = next(attributes["content"] for tag, attributes in page.elements if tag == "meta" and "http-equiv" in attributes)
    script = re.search(r"<script>(.*)</script>", source, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_tokens_carry_id_logprob_and_version_and_their_mask_shows(tmp_path, episode_of):
    page = Page(write_report(run_of(tmp_path, "retool_tiny", episode_of)).read_text())
    tokens = [attributes for tag, attributes in page.elements if tag == "i" and "title" in attributes][:9]
    assert [token["class"] for token in tokens] == ["obs", "obs", "obs", "p1", "p1", "obs", "p1", "p1", "p1"]
    assert tokens[0]["title"] == "0: id 1"
    # exp(-0.123457) = 0.8839
    assert tokens[3]["title"] == "3: id 4 · logprob -0.1235 (88.4%) · version 7 · turn 0"


def test_a_compared_run_is_drawn_into_the_same_charts_and_settings_that_differ_are_shown(tmp_path, episode_of):
    tool = run_of(tmp_path, "retool_tiny", episode_of)
    text_only = run_of(tmp_path, "text_only", episode_of, with_tool=False)
    page = Page(write_report(tool, compare=text_only, labels=("tool", "no tool")).read_text())
    assert "tool, greedy 97.5%" in page.text
    assert "no tool, greedy 97.5%" in page.text
    assert "psrl.staleness01" in page.text


def test_a_run_that_has_only_begun_has_a_page_too(tmp_path):
    folder = RunFolder.create(tmp_path, "gsm8k", datetime(2026, 3, 4, 5, 6, 7))
    assert "Training steps0" in Page(write_report(folder).read_text()).text


def test_long_trajectories_are_cut_in_the_page_and_counted(tmp_path, episode_of):
    episode = episode_of()
    trajectory = episode.result.trajectories[0]
    for _ in range(200):
        trajectory.append(trajectory.steps[1])  # four tokens each: 9 + 800
    folder = RunFolder.create(tmp_path, "gsm8k", datetime(2026, 3, 4, 5, 6, 7))
    writer = TrajectoryWriter(folder.trajectories)
    writer.write(episode, step=1)
    writer.close()
    page = Page(write_report(folder).read_text())
    assert "809 tokens, 605 sampled" in page.text
    assert "… 109 tokens left out …" in page.text
    assert sum(tag == "i" and "title" in attributes for tag, attributes in page.elements) == 700


def test_early_and_late_right_and_wrong_episodes_are_chosen(episode_of):
    records = [
        EpisodeRecord(step=step, episode=episode_of(f"train-{step}-{right}", reward=1.0 if right else -1.0, accuracy=float(right)))
        for step in range(1, 101)
        for right in (True, False)
    ]
    chosen = [(record.step, record.episode.score.reward) for record in chosen_episodes(records, 8)]
    assert sorted(chosen) == [(1, -1.0), (1, 1.0), (2, -1.0), (2, 1.0), (99, -1.0), (99, 1.0), (100, -1.0), (100, 1.0)]
    assert chosen_episodes([], 8) == []


@pytest.mark.parametrize(("logprob", "level"), [(0.0, 0), (-0.04, 0), (-0.3, 1), (-0.9, 2), (-2.0, 3), (-9.0, 4), (float("nan"), 4)])
def test_the_colour_of_a_token_follows_its_probability(logprob, level):
    assert logprob_level(logprob) == level


def test_ticks_are_round_numbers_inside_the_axis():
    assert ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 37) == [0, 10, 20, 30]
    assert ticks(5, 5) == [5]


def test_long_curves_are_thinned_to_means_of_neighbours():
    line = thinned(Series(label="reward", points=[(step, float(step % 2)) for step in range(1, 801)]))
    assert len(line.points) == 400
    assert line.points[0] == (2, 0.5)


def test_a_curve_without_points_is_not_drawn_and_one_point_is():
    assert chart_html(Chart(title="x", series=[Series(label="a", points=[])])) == ""
    assert "circle" in chart_html(Chart(title="x", series=[Series(label="a", points=[(0, 0.0)])]))
