"""One module makes the random numbers that privacy rests on; the others are read for any that they make themselves."""

from __future__ import annotations

import ast
import pathlib

import numpy as np
import pytest
from scipy import stats

from tfdp import entropy

_PACKAGE = pathlib.Path(__file__).parents[1] / "tfdp"

# What else may draw, and why. Everything here is repeatable on purpose or has nothing to do with a unit's data.
_ALLOWED = {
    "keras_private.py": {"from keras.src.random import seed_generator"},  # to see which models draw from Keras's own
    "models.py": {"np.random.default_rng(0)"},  # made-up records, on which a model is tried out
    "microbatches.py": {"np.random.default_rng(0)"},  # made-up records, on which steps are timed
    "evaluation/perplexity.py": {"np.random.default_rng(seed)"},  # resamples for an interval
    "evaluation/groups.py": {"np.random.default_rng(self.seed)"},  # the same, for a group
    "workflow/audit.py": {"np.random.Generator", "np.random.default_rng(0)"},  # which units an audit looks at
    "workflow/twin.py": {  # trained without privacy
        "tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(there))",
    },
    "workflow/language_models.py": {"np.random.default_rng(0)"},  # weights of the small untrained model
    "demo/pretrain.py": {  # how the shipped public model was made
        "keras.utils.set_random_seed(0)",
        "np.random.default_rng(0)",
        "np.random.Generator",
        "generator.shuffle(starts)",
    },
    "cli/checking/answers.py": {  # names of files that keep answers; it must not wait for numpy
        "import secrets",
        "secrets.token_bytes(_KEY_BYTES)",
        "secrets.token_hex(8)",
    },
}
_MODULES = {"secrets", "random", "uuid", "cryptography", "tempfile.random"}
_NAMES = {
    "urandom",
    "getrandom",
    "SystemRandom",
    "default_rng",
    "RandomState",
    "SeedSequence",
    "Philox",
    "PCG64",
    "Cipher",
    "ChaCha20",
    "rvs",
    "uuid1",
    "uuid4",
    "set_random_seed",
    "set_seed",
    "SeedGenerator",
    "shuffle",
    "random_uniform",
    "random_normal",
    "truncated_normal",
}


def drawn(tree):
    """The statements and expressions of a file that make random numbers, as text; of nested ones the largest."""
    found, inside = [], set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            names = [f"{module}.{alias.name}" for module in modules for alias in node.names]
            parts = {part for name in [*modules, *names] for part in name.split(".")}
            if {name.split(".")[0] for name in modules} & _MODULES or parts & (_NAMES | {"random"}):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call | ast.Attribute | ast.Name):
            function = node.func if isinstance(node, ast.Call) else node
            name = ast.unparse(function) if isinstance(function, ast.Attribute | ast.Name) else ""
            parts = name.split(".")
            if set(parts) & _NAMES or "random" in parts[:-1] or parts[0] in ("secrets", "uuid"):
                found.append(ast.unparse(node))
                inside |= {id(below) for below in ast.walk(node)}
    return found


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_no_other_file_draws(path):
    name = str(path.relative_to(_PACKAGE))
    if name != "entropy.py":
        assert set(drawn(ast.parse(path.read_bytes()))) == _ALLOWED.get(name, set())


@pytest.mark.parametrize(
    "code",
    [
        "import random",
        "import secrets as s",
        "from os import urandom",
        "from random import gauss",
        "from numpy import random as r",
        "import numpy.random as r",
        "from numpy.random import default_rng",
        "from cryptography.hazmat.primitives.ciphers import Cipher",
        "x = os.urandom(8)",
        "draw = os.urandom",
        "x = np.random.normal(size=3)",
        "x = np.random.default_rng().normal()",
        "x = np.random.Generator(np.random.PCG64())",
        "x = tf.random.normal([3])",
        "x = tf.random.stateless_normal([3], seed)",
        "x = keras.random.normal((3,))",
        "x = tf.keras.random.shuffle(x)",
        "x = stats.norm.rvs(size=3)",
        "x = dataset.shuffle(100)",
        "x = uuid.uuid4()",
        "keras.utils.set_random_seed(0)",
        "def f():\n    return tf.random.Generator.from_non_deterministic_state()",
    ],
)
def test_the_check_sees(code):
    assert len(drawn(ast.parse(code))) == 1


def test_every_exception_is_still_needed():
    for name, allowed in _ALLOWED.items():
        assert set(drawn(ast.parse((_PACKAGE / name).read_bytes()))) == allowed


class TestUniform:
    """Each byte of a million words as often as any other; a false alarm of either test is 1e-6."""

    @pytest.mark.parametrize("source", ["system", "buffer", "seeded", "generator"])
    def test_bytes(self, source):
        count = 100_000
        words = {
            "system": entropy.system_words,
            "buffer": lambda count: entropy.WordBuffer(count + 7).fill(count),
            "seeded": entropy.seeded_words(4),
            "generator": lambda count: entropy.system_generator().integers(2**64, size=count, dtype=np.uint64),
        }[source](count)
        assert words.dtype == np.uint64
        assert words.shape == (count,)
        for place in range(8):
            seen = np.bincount((words >> np.uint64(8 * place)).astype(np.uint8), minlength=256)
            assert 1e-6 / 16 < stats.chisquare(seen).pvalue < 1 - 1e-6 / 16
        z = np.corrcoef(words[1:], words[:-1])[0, 1] * np.sqrt(count)
        assert abs(z) < stats.norm.isf(5e-7)

    def test_bits_and_bytes(self):
        drawn = [entropy.system_bits(3) for _ in range(8000)]
        assert stats.chisquare(np.bincount(drawn, minlength=8)).pvalue > 1e-6
        assert len({entropy.system_bytes(16) for _ in range(100)}) == 100
        assert len(entropy.system_bytes(5)) == 5


class TestNeverTwice:
    def test_a_buffer_is_filled_anew(self):
        buffer = entropy.WordBuffer(1000)
        fills = [buffer.fill(count).copy() for count in (1000, 1000, 10, 500)]
        other = entropy.WordBuffer(1000).fill(1000)
        assert len(np.unique(np.concatenate([*fills, other]))) == 3510

    def test_the_key_is_the_systems(self, monkeypatch):
        """With what it gives fixed, the words are those of ChaCha20 under that key, and of nothing else."""
        monkeypatch.setattr(entropy.os, "urandom", lambda count: bytes(count))
        words = entropy.WordBuffer(8).fill(8)
        # RFC 8439, appendix A.1, test vector 1: the first block under a key, counter and nonce of zeros.
        expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        assert words.tobytes().hex().startswith(expected)
        assert not entropy.system_words(4).any()

    def test_seeded_streams_are_apart(self):
        """Draws of one seed, and its noise, come from other parts of Philox."""
        first, second = entropy.seeded_words(77)(100), entropy.seeded_words(77)(100)
        noise = [
            entropy.seeded_generator(77, step, index).bit_generator.random_raw(100)
            for step in (0, 1)
            for index in (0, 1)
        ]
        assert len(np.unique(np.concatenate([first, second, *noise]))) == 600
        again = entropy.seeded_generator(77, 1, 1).bit_generator.random_raw(100)
        np.testing.assert_array_equal(again, noise[3])
