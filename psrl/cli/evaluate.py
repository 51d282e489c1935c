"""`psrl eval`: validation of a model, without training."""

from __future__ import annotations

from psrl.cli.arguments import Overrides, Recipe
from psrl.cli.model_options import ApiKeyEnv, Model, ModelName, endpoint_of, overrides_of
from psrl.cli.plans import check_plan


def evaluate(
    recipe: Recipe, overrides: Overrides = None, model: Model = None, model_name: ModelName = None, api_key_env: ApiKeyEnv = None
) -> None:
    """Validate a model on RECIPE's validation tasks."""
    from psrl.config.load import Purpose, load_config

    endpoint = endpoint_of(model, model_name, api_key_env)
    if endpoint is not None:
        config = load_config(recipe, overrides or [], purpose=Purpose.ENDPOINT)
        from psrl.cli.summary import print_evaluation
        from psrl.runtime.endpoint_evaluation import evaluate_endpoint

        print_evaluation(evaluate_endpoint(config, endpoint))
        return
    config = load_config(recipe, [*(overrides or []), *overrides_of(model)], purpose=Purpose.VALIDATION)
    check_plan(config, with_training=False)
    from psrl.cli.summary import print_evaluation
    from psrl.runtime import evaluation

    print_evaluation(evaluation.evaluate(config))
