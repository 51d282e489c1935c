"""`psrl eval swe_tiny` with psrl's own engine: the patches of real episodes are predictions too."""

import json

import pytest

from psrl.cli.main import main


@pytest.mark.slow
def test_an_evaluation_of_a_model_folder_writes_predictions_of_all_its_tasks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as info:
        main(["eval", "swe_tiny", "data.generator.num_val=4", "train_actor_rollout_ref.rollout.n=1", "trainer.trajectories_per_step=1"])
    assert info.value.code == 0
    (folder,) = (tmp_path / "runs" / "swe_tiny").iterdir()
    predictions = json.loads((folder / "predictions.json").read_text())
    assert len(predictions) == 4
    assert all(set(each) == {"instance_id", "model_name_or_path", "model_patch"} for each in predictions.values())
    results = json.loads((folder / "results.json").read_text())
    assert {each["instance_id"] for each in results} == set(predictions)
    assert all(each["num_sampled"] > 0 and each["num_turns"] > 0 for each in results)
    assert len((folder / "trajectories" / "val.jsonl").read_text().splitlines()) == 2  # one task: sampled and greedy
    assert f"resolved {sum(each['is_resolved'] for each in results)} of 4" in capsys.readouterr().out
