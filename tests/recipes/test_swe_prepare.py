"""`psrl prepare swe`: rows of others, pinned, balanced and split; and a folder of projects whose tests are found by running them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recipes.swe_published_rows import bench_row, bench_row_5, gym_row, smith_row
from recipes.swe_task_folders import write_task, write_tasks

from psrl.cli.main import main
from psrl.config.data import DataConfig
from psrl.datasets.source import build_source
from psrl.errors import ConfigError
from psrl.recipes.published_rows import rows_of_source
from psrl.recipes.swe.images import digest_of
from psrl.recipes.swe.prepare import prepare
from psrl.recipes.swe.row_files import write_problems
from psrl.recipes.swe.splits import balanced_subset, split_problems
from psrl.types import SweProblem

DIGEST = "sha256:" + "ab" * 32


def pinned(row):
    name = row.get("image") or row.get("image_name") or "docker.io/some/image"
    return {**row, "image" if "image_name" not in row else "image_name": f"{name.split(':')[0]}@{DIGEST}"}


def rows_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problems_in(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [SweProblem.of_row(row["extra_info"]["swe"], source=str(file), uid=str(number)) for number, row in enumerate(rows)]


def reasons_in(folder):
    file = folder / "left_out.jsonl"
    return Counter(json.loads(line)["reason"] for line in file.read_text().splitlines()) if file.exists() else Counter()


def test_rows_of_all_three_formats_are_written_pinned_and_read_as_tasks(tmp_path, capsys):
    rows = [pinned(bench_row_5()), pinned(gym_row()), pinned(smith_row()), pinned(bench_row(instance_id="pallets__flask-2"))]
    output = prepare(rows_file(tmp_path / "rows.jsonl", rows), tmp_path / "out", with_model=False, test_share=0.5)
    written = problems_in(output / "train.jsonl") + problems_in(output / "test.jsonl")
    assert all(problem.image.endswith(f"@{DIGEST}") for problem in written)
    assert {problem.repo for problem in written} == {"pallets/flask", "getmoto/moto", "swesmith/mewwts__addict.75284f95"}
    data = DataConfig(train_files=[str(output / "train.jsonl")], val_files=[str(output / "test.jsonl")])
    source = build_source(data, prompt_tokens=lambda task: 1)
    assert source.report.num_train + source.report.num_val == 4
    task = source.next_tasks(1)[0]
    assert task.data_source in ("swe_bench", "swe_gym", "swe_smith")
    assert task.prompt[0].content == SweProblem.of_task(task).statement
    assert "problems of" in capsys.readouterr().out


def test_what_cannot_be_used_is_counted_by_reason_and_named(tmp_path, capsys):
    rows = [
        pinned(bench_row_5()),
        pinned(bench_row_5()),
        pinned(bench_row_5(instance_id="a-1", problem_statement="")),
        pinned(smith_row(problem_statement="")),
        pinned(bench_row_5(instance_id="a-2", patch="nonsense")),
        bench_row_5(instance_id="a-3"),
    ]
    source = rows_file(tmp_path / "rows.jsonl", rows)
    source.write_text(source.read_text() + "{broken\n" + "[" * 100_000 + "\n")
    output = prepare(source, tmp_path / "out", with_model=False, test_share=0)
    assert reasons_in(output) == {"empty_statement": 2, "duplicate": 1, "bad_patch": 1, "image_not_pinned": 1, "not_json": 2}
    printed = capsys.readouterr().out
    assert "7 left out: empty_statement 2" in printed
    assert "rows.jsonl row 1: duplicate: pallets__flask-5014 was there before" in printed
    assert "docker pull them first, or give --allow-tags" in printed
    assert len(problems_in(output / "train.jsonl")) == 1


def test_tags_are_kept_where_the_user_allows_them(tmp_path):
    source = rows_file(tmp_path / "rows.jsonl", [bench_row_5(image="swebench/not-on-this-machine:latest")])
    output = prepare(source, tmp_path / "out", with_model=False, allow_tags=True, allow_network=True, test_share=0)
    (problem,) = problems_in(output / "train.jsonl")
    assert (problem.image, problem.allow_network) == ("swebench/not-on-this-machine:latest", True)
    with pytest.raises(ConfigError, match="image_not_pinned"):
        prepare(source, tmp_path / "out", with_model=False)


def test_a_text_that_cannot_be_written_leaves_both_files_as_they_were(tmp_path):
    files = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    for file in files:
        file.write_text("old\n")
    bad = replace(problem("bad", "b"), gold_patch="\ud800")
    with pytest.raises(UnicodeEncodeError):
        write_problems({files[0]: [problem("good", "a")], files[1]: [bad]}, {"good": "s", "bad": "s"})
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert [file.read_text() for file in files] == ["old\n", "old\n"]
    rows = [pinned(bench_row_5()), pinned(smith_row(problem_statement="half \ud800 a character"))]
    prepare(rows_file(tmp_path / "rows.jsonl", rows), tmp_path, with_model=False, test_share=0)
    assert [each.instance_id for each in problems_in(files[0])] == ["pallets__flask-5014"]
    assert reasons_in(tmp_path) == {"bad_field": 1} and files[1].read_text() == ""


def test_a_source_without_rows_is_said_to_be_empty(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no row"):
        prepare(tmp_path / "rows.jsonl", tmp_path / "out", with_model=False)
    assert not (tmp_path / "out").exists()


def test_what_rows_say_cannot_steer_the_terminal(tmp_path, capsys):
    rows = [pinned(bench_row_5()), pinned(bench_row_5(instance_id="a-1", image="\x1b[2J"))]
    prepare(rows_file(tmp_path / "rows.jsonl", rows), tmp_path / "out", with_model=False, test_share=0)
    printed = capsys.readouterr().out
    assert "a-1" in printed and "\x1b" not in printed


def test_the_digest_of_an_image_is_the_one_of_its_own_name():
    digests = [f"mirror/x@{DIGEST}", f"swebench/x@sha256:{'cd' * 32}", "odd"]
    assert digest_of("docker.io/swebench/x:latest", digests) == f"swebench/x@sha256:{'cd' * 32}"
    assert digest_of("localhost:5000/other:1", digests) == f"mirror/x@{DIGEST}"
    assert digest_of("swebench/x", []) is None


def test_parquet_json_lists_and_folders_with_splits_are_read_alike(tmp_path):
    rows = [pinned(gym_row(instance_id=f"getmoto__moto-{number}")) for number in range(3)]
    folder = tmp_path / "copy" / "data"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "test-00000-of-00001.parquet")
    (folder / "train.json").write_text(json.dumps(rows, indent=1))
    read = [raw for _, _, raw in rows_of_source(tmp_path / "copy", split=None)]
    assert [raw["instance_id"] for raw in read] == [row["instance_id"] for row in rows] * 2
    assert [raw for _, _, raw in rows_of_source(tmp_path / "copy", split="test")] == rows
    with pytest.raises(ConfigError, match="dev"):
        list(rows_of_source(tmp_path / "copy", split="dev"))


def test_a_file_of_brackets_is_refused_by_its_name(tmp_path):
    (tmp_path / "rows.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"rows\.json.*cannot be read as JSON"):
        prepare(tmp_path / "rows.json", tmp_path / "out", with_model=False)


def problem(name, repo):
    texts = {"statement": "s", "gold_patch": "p", "task_kind": "swe"}
    return SweProblem(instance_id=name, repo=repo, test_paths=("t",), fail_to_pass=("f",), **texts)


MANY = [problem(f"{repo}-{number}", repo) for repo, count in (("a", 9), ("b", 2), ("c", 1)) for number in range(count)]


def test_a_subset_takes_turns_over_the_repositories_whatever_the_order_of_the_rows():
    assert Counter(each.repo for each in balanced_subset(MANY, 5, seed=1)) == {"a": 2, "b": 2, "c": 1}
    ids = {each.instance_id for each in balanced_subset(MANY, 5, seed=1)}
    assert ids == {each.instance_id for each in balanced_subset(MANY[::-1], 5, seed=1)}
    assert len({frozenset(each.instance_id for each in balanced_subset(MANY, 5, seed=seed)) for seed in range(8)}) > 1
    assert balanced_subset(MANY, 99, seed=1) == MANY


def test_whole_repositories_are_held_out_and_one_is_left_to_train_on():
    for seed in range(8):
        train, test = split_problems(MANY, 0.1, seed=seed)
        assert not {each.repo for each in train} & {each.repo for each in test}
        assert train and test and len(train) + len(test) == 12
    assert split_problems(MANY, 0, seed=1) == (MANY, [])
    assert split_problems(MANY, 1, seed=1) == ([], MANY)
    train, test = split_problems(MANY[:9], 0.25, seed=1)
    assert (len(train), len(test)) == (7, 2)  # one repository: problem by problem, 0.25 x 9 rounded


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "exactly one of --source, --hub and --tasks"),
        (["--hub", "verified", "--tasks", "."], "--hub --tasks"),
        (["--tasks", ".", "--split", "test"], "no effect on --tasks"),
        (["--tasks", ".", "--allow-tags"], "--allow-tags"),
        (["--tasks", ".", "--allow-network"], "--allow-network"),
        (["--source", ".", "--k", "2"], "without which nothing is run"),
        (["--source", ".", "--concurrency", "2"], "without which nothing is run"),
        (["--hub", "verified", "--backend", "docker"], "without which nothing is run"),
        (["--source", ".", "--validate", "--backend", "bubblewrap"], "whose projects are in images"),
        (["--source", ".", "--validate", "--backend", "process"], "give --backend one of docker,"),
        (["--source", "/etc/hostname", "--split", "test"], "--source names one file"),
        (["--source", "."], "holds no file of rows"),
        (["--hub", "verified", "--format", "swe"], "swe_bench, swe_gym, swe_smith"),
        (["--tasks", ".", "--k", "0"], "--k"),
        (["--tasks", ".", "--test-share", "2"], "--test-share"),
        (["--tasks", ".", "--backend", "podman"], "bubblewrap, docker"),
        (["--tasks", "/nowhere"], "is no folder"),
        (["--subst", "3"], "did you mean --subset?"),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_name(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as info:
        main(["prepare", "swe", "--no-with-model", *words])
    assert info.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_good_projects_become_rows_and_bad_ones_are_named_with_their_reason(tmp_path, capsys):
    root = write_tasks(tmp_path / "tasks", good=2)
    write_task(root, "bad_gold", gold_patch="--- nothing\n")
    write_task(root, "bad_mend", mended="return a - b - 1")
    write_task(root, "no_words", statement=" \n")
    write_task(root, "typo", task_yaml="tests: [tests]\n")
    write_task(root, "broken", tests="def test_sum(:\n")
    output = tmp_path / "out"
    with pytest.raises(SystemExit) as info:
        main(["prepare", "swe", "--tasks", str(root), "--output", str(output), "--no-with-model", "--k", "1"])
    assert info.value.code == 0
    errors = [json.loads(line) for line in (output / "left_out.jsonl").read_text().splitlines()]
    left_out = {error["source"]: error["reason"] for error in errors}
    assert "SyntaxError" in next(error["detail"] for error in errors if error["source"] == "broken")
    assert "; )" not in str(errors)
    assert left_out == {
        "bad_gold": "bad_patch",
        "bad_mend": "no_fail_to_pass",
        "no_words": "empty_statement",
        "typo": "bad_task_yaml",
        "broken": "tests_do_not_run",
    }
    kept = problems_in(output / "train.jsonl") + problems_in(output / "test.jsonl")
    assert {each.instance_id for each in kept} == {"good_0", "good_1"}
    assert {(each.fail_to_pass, each.pass_to_pass) for each in kept} == {
        (("tests/test_sums.py::test_sum",), ("tests/test_sums.py::test_nothing",))
    }
    assert len(problems_in(output / "test.jsonl")) == 1
    printed = capsys.readouterr().out
    assert "tested 7/7" in printed and "typo: bad_task_yaml: 'tests' is not known" in printed


def test_a_folder_of_which_nothing_can_be_used_writes_no_rows_and_says_why(tmp_path):
    root = tmp_path / "tasks"
    write_task(root, "one", statement="")
    with pytest.raises(ConfigError, match="empty_statement"):
        prepare(tasks=root, output=tmp_path / "out", with_model=False)
    assert [path.name for path in Path(tmp_path / "out").iterdir()] == ["left_out.jsonl"]
