"""The models that commands know by name."""

from __future__ import annotations

from typing import Any

GPT2_DEMO = "gpt2:demo"


def network(name: str, lora_rank: int | None = None) -> Any:
    """The model of `--model`, as it begins: "gpt2:demo", or what `tfdp.workflow.build_model` takes."""
    from tfdp.cli.startup import quiet_start
    from tfdp.workflow import add_lora, build_model

    with quiet_start():
        import keras_hub  # noqa: F401 - to have its start-up messages here
        import tensorflow as tf

        tf.config.list_logical_devices()
    if name != GPT2_DEMO:
        return build_model(name, lora_rank=lora_rank)
    from tfdp.demo.public_model import load_public_model

    model = load_public_model(compile=False)
    if lora_rank is not None:
        add_lora(model, lora_rank)
    return model
