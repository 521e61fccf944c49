"""Every text model of KerasHub: book-keeping against a loop over records, or a refusal for a true reason.

The findings are a table, examples/families.md. TFDP_WRITE_FAMILIES=1 writes it anew; otherwise its verdicts have to be
those that were found.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from tfdp import keras_private
from tfdp.errors import TfdpError, UnsupportedLayerError
from tfdp.gradients import clipped_gradients, hybrid
from tfdp.models import check_model

TABLE = pathlib.Path(__file__).parents[2] / "examples" / "families.md"
VOCABULARY, TOKENS, COUNT = 19, 5, 3
SHAPE = {"vocabulary_size": VOCABULARY, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 12}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 3, "top_k": 2}
SMOLLM3 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True],
    "layer_types": ["attention"],
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 16,
    "rope_theta": 100.0,
    "partial_rotary_factor": 1.0,
}
QWEN3_5 = {
    "num_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
GEMMA3N = {
    "vocabulary_size": None,
    "text_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_dim": None,
    "text_hidden_size": 8,
    "hidden_size_per_layer_input": 2,
    "num_layers": None,
    "num_hidden_layers": 1,
    "intermediate_dim": None,
    "intermediate_size": [12],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "layer_types": ["full_attention"],
    "hidden_activation": "gelu_approximate",
    "sliding_window": 4,
    "rope_theta": 100.0,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "altup_num_inputs": 2,
    "laurel_rank": 1,
}
EDREC = {
    "vocabulary_size": None,
    "vocab_size": VOCABULARY,
    "num_layers": None,
    "num_layers_enc": 1,
    "num_layers_dec": 1,
}
T5GEMMA = dict.fromkeys(name for name in SHAPE if name != "vocabulary_size") | {
    f"{side}_{option}": value
    for side in ("encoder", "decoder")
    for option, value in {
        "hidden_dim": 8,
        "intermediate_dim": 12,
        "num_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "layer_types": ["full_attention"],
    }.items()
}


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """How to make a tiny model of one family.

    Attributes:
        name: as in `keras_hub.models.<name>Backbone`.
        options: what the backbone takes beside SHAPE; None takes one of SHAPE away.
        tasks: endings of `keras_hub.models.<name><task>`; "" for a head of our own on a backbone without tasks.
        lora: names of layers for `enable_lora`, where its own default finds none.
    """

    name: str
    options: dict[str, Any]
    tasks: tuple[str, ...] = ("CausalLM",)
    lora: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return self.name


ENCODER = ("TextClassifier", "MaskedLM")
HEADS = {"num_heads": 2, "dropout": 0.0}
FAMILIES = [
    Family("GPT2", HEADS | {"max_sequence_length": TOKENS + 1}),
    Family("GPTNeoX", HEADS | {"rotary_percentage": 0.5}, lora=("query_key_value",)),
    Family("OPT", HEADS | {"max_sequence_length": TOKENS}),
    Family("Bloom", HEADS),
    Family("Falcon", {"num_attention_heads": 2}),
    Family("Llama", GROUPED),
    Family("Llama3", GROUPED),
    Family("Mistral", GROUPED),
    Family("Mixtral", GROUPED | EXPERTS),
    Family("Qwen", GROUPED),
    Family("Qwen3", GROUPED | {"head_dim": 4}),
    Family("QwenMoe", GROUPED | EXPERTS | {"moe_intermediate_dim": 6, "shared_expert_intermediate_dim": 6}),
    Family("Qwen3Moe", GROUPED | EXPERTS | {"moe_intermediate_dim": 6, "head_dim": 4}),
    Family("Gemma", GROUPED | {"head_dim": 4}),
    Family("Gemma3", GROUPED | {"head_dim": 4, "image_size": None, "use_sliding_window_attention": True}),
    Family("Gemma3n", GEMMA3N, lora=("q_proj", "v_proj")),
    Family("Phi3", GROUPED),
    Family("SmolLM3", SMOLLM3, lora=("q_proj", "v_proj")),
    Family("GptOss", GROUPED | EXPERTS | {"head_dim": 4}),
    Family("Gemma4", GROUPED | {"head_dim": 4, "image_size": None}),
    Family("Qwen3_5", GROUPED | QWEN3_5),
    Family(
        "Qwen3_5Moe",
        GROUPED
        | EXPERTS
        | {"intermediate_dim": None, "moe_intermediate_dim": 6, "shared_expert_intermediate_size": 6}
        | QWEN3_5,
    ),
    Family("RWKV7", {"hidden_dim": None, "hidden_size": 8, "head_size": 4, "num_layers": 2, "gate_lora": 3}),
    Family("Bert", HEADS, ENCODER),
    Family("Roberta", HEADS, ENCODER),
    Family("XLMRoberta", HEADS, ENCODER),
    Family("DistilBert", HEADS, ENCODER),
    Family("Albert", HEADS | {"num_layers": 2, "embedding_dim": 6}, ENCODER),
    Family("DebertaV3", HEADS | {"bucket_size": 4, "max_sequence_length": 16}, ENCODER),
    Family("Electra", HEADS | {"vocabulary_size": None, "vocab_size": VOCABULARY, "embedding_dim": 6}, ("",)),
    Family("FNet", {"dropout": 0.0}, ENCODER, ("intermediate_dense", "output_dense")),
    Family("RoformerV2", HEADS | {"head_size": 4}, ENCODER, ("q_dense_layer", "v_dense_layer")),
    Family("XLNet", HEADS, ("",)),
    Family("ESM", HEADS, ("ProteinClassifier", "MaskedPLM"), ("q_dense_layer", "v_dense_layer")),
    Family("T5", HEADS, ("Seq2SeqLM",), ("query_projector", "value_projector")),
    Family("T5Gemma", T5GEMMA, ("Seq2SeqLM",)),
    Family("T5Gemma2", T5GEMMA, ("Seq2SeqLM",)),
    Family("Bart", HEADS | {"max_sequence_length": TOKENS}, ("Seq2SeqLM",)),
    Family("EdRec", HEADS | EDREC, ("Seq2SeqLM",)),
]


def build(family: Family, task: str) -> Any:
    """A tiny model with random weights (no zeros or ones, which hide mistakes), compiled."""
    keras.utils.set_random_seed(1)
    options = {name: value for name, value in (SHAPE | family.options).items() if value is not None}
    if "image_size" in family.options:
        options["image_size"] = None
    backbone = getattr(keras_hub.models, f"{family.name}Backbone")(**options)
    if not task:
        output = backbone.output["pooled_output"] if isinstance(backbone.output, dict) else backbone.output[:, 0]
        model = keras.Model(backbone.input, keras.layers.Dense(3, name="logits")(output))
        model.backbone = backbone
    elif task.endswith("Classifier"):
        head = {"num_classes": 3, "dropout": 0.0, "preprocessor": None}
        model = getattr(keras_hub.models, f"{family.name}{task}")(backbone=backbone, **head)
    else:
        model = getattr(keras_hub.models, f"{family.name}{task}")(backbone=backbone, preprocessor=None)
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def records(model: Any) -> Any:
    """Records for whatever inputs the model has, of ragged length behind a padding mask."""
    generator = np.random.default_rng(0)
    mask = np.arange(TOKENS) < np.array([[TOKENS], [2], [4]])
    made = {
        "token_ids": lambda: generator.integers(1, VOCABULARY, mask.shape) * mask,
        "padding_mask": lambda: mask,
        "segment_ids": lambda: generator.integers(0, 2, mask.shape),
        "position_ids": lambda: np.tile(np.arange(TOKENS), (COUNT, 1)),
        "mask_positions": lambda: generator.integers(0, 3, (COUNT, 2)),
    }
    inputs = model.input
    x = {}
    for name, spec in inputs.items():
        kind = name.removeprefix("encoder_").removeprefix("decoder_")
        x[name] = made[kind]().astype(keras.backend.standardize_dtype(spec.dtype))
    shape = model.output.shape[1:-1]
    y = generator.integers(0, model.output.shape[-1], (COUNT, *(size or TOKENS for size in shape)))
    if "mask_positions" in x:
        y = y[:, :2]
        return x, y, np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]], "float32")
    return (x, y) if not shape else (x, y, mask.astype("float32"))


# T5's own, which takes its masks as arguments.
MASK_LEFT_OFF = pytest.mark.filterwarnings("ignore:Layer '.*_attention' .of type T5MultiHeadAttention.:UserWarning")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    family: str
    task: str
    trained: str
    verdict: str
    deviation: str = ""
    rules: str = ""
    formed: str = ""
    frozen: str = ""


CASES = [(family, task, trained) for family in FAMILIES for task in family.tasks for trained in ("full", "LoRA")]


def unused(model: Any, data: Any) -> list[Any]:
    """Layers whose variables no loss depends on, such as the pooled output of an encoder under a masked-LM head."""
    x, y, *_ = tf.nest.map_structure(tf.convert_to_tensor, data)
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    idle = {id(v) for v, gradient in zip(model.trainable_variables, gradients, strict=True) if gradient is None}
    return [
        layer
        for layer in keras_private.flatten_layers(model)
        if (own := keras_private.own_variables(layer)) and all(id(v) in idle for v in own)
    ]


def outcome(family: Family, task: str, trained: str, oracle: Any) -> Outcome:
    """What book-keeping makes of one model, and how far from the loop."""
    keras.utils.clear_session(free_memory=False)  # names begin anew
    model = build(family, task)
    if trained == "LoRA":
        model.backbone.enable_lora(2, target_layer_names=family.lora)
        assert any("lora" in v.path for v in model.trainable_variables)
    data = records(model)
    named = f"LoRA on {', '.join(family.lora)}" if family.lora else "LoRA"
    line = functools.partial(Outcome, family.name, task or "own head", "full" if trained == "full" else named)
    findings = check_model(model, hybrid=True)
    if findings:  # those that no freezing would help come first
        return line(f"refused: {min(findings, key=lambda finding: finding.id).message}")
    idle = unused(model, data)
    for layer in idle:
        layer.trainable = False
    oracle.shaken(model)
    reference = oracle.reference_of(model, data)
    clip_norm = float(np.median(reference.norms))
    data = tf.nest.map_structure(tf.convert_to_tensor, data)
    formed: list[Any] = []
    try:
        try:
            sums, norms, _ = clipped_gradients(model, data, clip_norm)
        except UnsupportedLayerError:
            cuts = hybrid.find_cuts(model, data[0], COUNT)
            formed = [variable for variables in cuts.values() for variable in variables]
            sums, norms, _ = clipped_gradients(model, data, clip_norm, hybrid=True)
    except TfdpError as error:
        return line(f"refused: {error}")
    apart = float(np.max(np.abs(norms / reference.norms - 1.0)))
    wanted = reference.sums(clip_norm)
    floor = 1e-2 * np.linalg.norm(oracle.flat(wanted))  # no variable hides behind a larger one
    distance = max(
        float(np.linalg.norm(got - want) / max(np.linalg.norm(want), floor))
        for got, want in zip(sums, wanted, strict=True)
    )
    by_path: tuple[set[str], set[str]] = set(), set()
    for layer in keras_private.flatten_layers(model):
        for variable in keras_private.own_variables(layer):
            if variable.trainable:
                by_path[any(variable is each for each in formed)].add(type(layer).__name__)
    exact = "exact with hybrid=True" if formed else "exact"
    verdict = exact if apart < 1e-4 and distance < 1e-4 else "WRONG"
    deviation = f"{apart:.0e}, {distance:.0e}"
    paths = (", ".join(sorted(names)) for names in by_path)
    return line(verdict, deviation, *paths, ", ".join(sorted({layer.name for layer in idle})))


@pytest.fixture(scope="module")
def outcome_of(oracle: Any) -> Any:
    """Every case is tried once, by whichever test asks first."""

    @functools.cache
    def made(family: Family, task: str, trained: str) -> Outcome:
        return outcome(family, task, trained, oracle)

    return made


def table(lines: list[Outcome]) -> str:
    header = """# Text models of KerasHub

Made by tests/gradients/test_families.py: tiny models with random weights, three records of ragged length, per-unit
clipped gradients of book-keeping against a loop over records.

*exact*: norms and clipped sums agree to a relative 1e-4. The numbers are the largest deviation of a norm, and of the
clipped sum of a variable. *layers by rule* hold variables that go by the rule of their layer; *vectorized* are the
layers whose variables go by the vectorized path, which has to be asked for (`hybrid=True`). *LoRA* is
`backbone.enable_lora(2)`, with `target_layer_names` where its default names no layer of the family. *frozen* are
layers that the task's loss does not depend on: they have to be frozen (`layer.trainable = False`).

| family | task | trained | verdict | norm, sum | layers by rule | vectorized | frozen |
|---|---|---|---|---|---|---|---|
"""
    rows = ["".join(f" {value} |" for value in dataclasses.astuple(line)) for line in lines]
    return header + "".join(f"|{row}\n" for row in rows)


def verdicts(text: str) -> list[list[str]]:
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[column.strip() for column in row[1:5]] for row in rows]


@MASK_LEFT_OFF
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case if str(part)))
def test_exact_or_refused(outcome_of, case):
    found = outcome_of(*case)
    assert found.verdict in ("exact", "exact with hybrid=True") or found.verdict.startswith("refused: "), found


@MASK_LEFT_OFF
def test_the_committed_table_says_so(outcome_of):
    made = table([outcome_of(*case) for case in CASES])
    if os.environ.get("TFDP_WRITE_FAMILIES") == "1":
        TABLE.write_text(made)
    assert verdicts(TABLE.read_text()) == verdicts(made)


# They read images or sound, or what another model makes of a text while it writes.
NOT_TEXT = ("BLIP2", "PaliGemma", "PARSeq", "Moonshine", "Gemma4Assistant")


def test_no_text_model_of_keras_hub_is_left_out():
    """Every task of every family stands in the table; what KerasHub exports under two names is one class."""
    models = keras_hub.models
    kinds = (models.CausalLM, models.MaskedLM, models.TextClassifier, models.Seq2SeqLM)
    offered = {each for each in vars(models).values() if isinstance(each, type) and issubclass(each, kinds)}
    listed = {getattr(models, f"{family.name}{task}") for family in FAMILIES for task in family.tasks if task}
    left_out = {each.__name__ for each in offered - listed - set(kinds)}
    assert {name for name in left_out if not name.startswith(NOT_TEXT)} == set()
    assert len(left_out) == len(NOT_TEXT) + 1  # BLIP2 in two tasks


@MASK_LEFT_OFF
@pytest.mark.parametrize("name", ["T5", "DebertaV3", "RWKV7"])
def test_variables_in_the_middle_of_a_call_under_xla(oracle, name):
    """As the private step runs them: traced, compiled, and two records a unit."""
    family = next(family for family in FAMILIES if family.name == name)
    model = oracle.shaken(build(family, family.tasks[0]))
    data = tf.nest.map_structure(lambda leaf: leaf[[0, 1, 2, 1]], records(model))
    reference = oracle.reference_of(model, data, records_per_unit=2)
    clip_norm = float(np.min(reference.norms))
    result = oracle.private(model, data, clip_norm, records_per_unit=2, jit_compile=True)
    oracle.assert_agrees(result, reference, clip_norm)


@pytest.mark.parametrize("name", ["Mixtral", "QwenMoe", "Qwen3Moe", "Qwen3_5Moe"])
def test_experts_add_a_loss_that_mixes_units(name):
    """The reason why they are refused: the loss of two records of one length is not the mean of their losses."""
    model = build(next(family for family in FAMILIES if family.name == name), "CausalLM")
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (2, TOKENS))

    def added(rows: slice) -> float:
        model({"token_ids": tf.constant(ids[rows]), "padding_mask": tf.ones_like(ids[rows])}, training=True)
        assert model.losses
        return float(sum(model.losses))

    assert added(slice(2)) != pytest.approx((added(slice(1)) + added(slice(1, 2))) / 2, rel=1e-3)


def test_xlnet_lets_the_padding_of_one_record_reach_another():
    layer = keras_private.hub_class("xlnet.xlnet_encoder:XLNetAttentionMaskLayer")(4, 0.02)
    both = np.array([[1, 1, 1], [1, 0, 0]])
    pair, alone = layer(tf.constant(both))[1], layer(tf.constant(both[:1]))[1]
    assert np.any(pair[0] != alone[0])
