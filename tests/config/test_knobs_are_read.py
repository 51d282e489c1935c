"""No dead knob: every setting is read somewhere outside of config/."""

import ast
from pathlib import Path

from psrl.config.fields import leaves_of
from psrl.config.tree import Config

PACKAGE = Path(__file__).parent.parent.parent / "psrl"
REFUSED_UNLESS_DEFAULT = {
    "data.return_raw_chat": "verl's switch, kept for its users' files: false is refused",
}
"""Settings of which only one value passes the checks, so that nothing can depend on them."""
READ_THROUGH_A_PROPERTY = {"train_actor_rollout_ref.model.compute_dtype": "served_dtype"}
"""Settings that parts read through a property of their section."""
READ_BY_THE_PLAN = tuple(
    f"psrl.deployment.{name}"
    for name in (
        *("num_instances", "num_validation_instances", "gpus_per_instance", "nodes_per_instance", "share_gpus"),
        *("cores_per_node", "memory_gib_per_node", "gpus_per_node", "gpu_memory_gib"),
    )
)
"""What `config/placement.py` and `config/plan_of_nodes.py` read for everybody."""


def attributes_read() -> set[str]:
    """Names read as `something.name` in the package outside of config/."""
    files = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "config")]
    return {
        node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_setting_is_read_by_a_part():
    read = attributes_read()
    read |= {key.rsplit(".", 1)[-1] for key, name in READ_THROUGH_A_PROPERTY.items() if name in read}
    excused = (*REFUSED_UNLESS_DEFAULT, *READ_BY_THE_PLAN)
    dead = [leaf.key for leaf in leaves_of(Config) if leaf.key.rsplit(".", 1)[-1] not in read and leaf.key not in excused]
    assert dead == []


def test_a_name_that_nobody_reads_is_noticed():
    assert "no_such_setting" not in attributes_read()
