"""Files made to do harm: each ends in a clear finding, in bounded time and memory.

What the fuzzer of the reader found is kept here as well.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time
import warnings

import pytest

from tfdp.errors import SpecError
from tfdp.findings import printable
from tfdp.review.catalogue import BASE
from tfdp.spec import PrivacySpec

BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)
MANY = 120_000

TEXTS = {
    "ten-megabytes.yaml": b"#" * 10_000_000,
    "ten-megabytes.json": b'{"a": "' + b"x" * 10_000_000 + b'"}',
    "deep.yaml": b"[" * 100_000,
    "deep.json": b'{"a":' * 20_000,
    "deep-block.yaml": b"".join(b" " * i + b"a:\n" for i in range(400)),
    "bomb.yaml": BOMB.encode(),
    "recursive.yaml": b"a: &a [*a]",
    "duplicate.yaml": BASE.replace("  delta", "  epsilon: 2\n  delta").encode(),
    "duplicate.json": b'{"claim": {"epsilon": 1, "\\u0065psilon": 2}}',
    "nan.yaml": BASE.replace("1.2", ".nan").encode(),
    "nan.json": b'{"claim": {"epsilon": NaN}}',
    "infinite.yaml": BASE.replace("1.2", "1e400").encode(),
    "infinite.json": b'{"claim": {"epsilon": 1e400}}',
    "boolean.yaml": BASE.replace("1.2", "true").encode(),
    "quoted.yaml": BASE.replace("1.2", '"1.2"').encode(),
    "latin.yaml": BASE.replace("one text", "caf\xe9").encode("latin-1"),
    "utf16.yaml": BASE.encode("utf-16"),
    "zero.yaml": b"a: \x00",
    "values.yaml": b"[" + b"1," * 60_000 + b"]",
    "values.json": b"[" + b"1," * 60_000 + b"1]",
    "keys.yaml": b"".join(b"k%d: 1\n" % i for i in range(9000)),
    "keys.json": json.dumps({f"k{i}": 1 for i in range(9000)}).encode(),
    "documents.yaml": b"---\na: 1\n" * 3_000,
    "names.yaml": (b"---\n" + b"".join(b"e%dpsilon: 1\n" % i for i in range(45))) * 100,
    "digits.yaml": BASE.replace("1.2", "1" * MANY).encode(),
    "digits.json": b'{"claim": {"epsilon": ' + b"1" * MANY + b"}}",
    # Matching a number in a text of ones that ends in a letter took time that grew with the square of its length.
    "backtracking.yaml": BASE.replace("1.2", "1" * MANY + "x").encode(),
    "underscores.yaml": BASE.replace("1.2", "1_" * (MANY // 2) + "x").encode(),
    "colons.yaml": BASE.replace("1.2", "1:" * (MANY // 2)).encode(),
    "long-key.yaml": b"k" * MANY + b": 1",
    "long-key.json": b'{"' + b"k" * MANY + b'": 1}',
    "long-choice.yaml": BASE.replace("kind: example", "kind: " + "example" * 15_000).encode(),
    "object.yaml": b"!!python/object/apply:os.system [true]",
    "include.yaml": b"claim: !include /etc/passwd",
    # Found by fuzzing: the library fails with IndexError, KeyError and a warning.
    "sign.yaml": BASE.replace("1.2", "!!float -").encode(),
    "no-number.yaml": BASE.replace("1.2", "!!int").encode(),
    "maybe.yaml": BASE.replace("true", "!!bool maybe").encode(),
    "anchors.yaml": BASE.replace("kind: ", "kind: &a ").replace("scheme: ", "scheme: &a ").encode(),
    "surrogate.json": b'{"claim": {"epsilon": "\\ud800"}, "\\udfff": 1}',
    "beyond.yaml": b'a: "\\U00110000"',
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """All of them in one process that is killed when it takes more than it may: findings by file, and its seconds."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, content in TEXTS.items():
        (folder / name).write_bytes(content)
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "from tfdp.cli import main\nmain(['validate', '--format', 'json', '--no-cache', *sys.argv[1:]])"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *(str(folder / name) for name in TEXTS)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    after = os.times()
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stderr == ""
    found = {name: [] for name in TEXTS}
    for finding in json.loads(done.stdout)["findings"]:
        found[os.path.basename(finding["file"])].append(finding)
    return found, after.children_user - before.children_user


@pytest.mark.parametrize("name", TEXTS)
def test_a_clear_finding(judged, name):
    findings = judged[0][name]
    assert 1 <= len(findings) <= 10_000
    for finding in findings:
        assert finding["id"] in ("PS000", "PS001", "PS002")
        assert finding["message"].startswith("expected ")
        assert len(finding["message"]) < 400
        assert len(finding["where"]) <= 200
        assert len(finding["fix"]) > 5


def test_all_of_them_take_seconds(judged):
    assert judged[1] < 20


@pytest.mark.parametrize(
    ("name", "id", "says"),
    [
        ("ten-megabytes.yaml", "PS000", "characters"),
        ("deep.yaml", "PS000", "levels"),
        ("deep-block.yaml", "PS000", "levels"),
        ("bomb.yaml", "PS000", "alias"),
        ("recursive.yaml", "PS000", "alias"),
        ("duplicate.yaml", "PS002", "second time"),
        ("duplicate.json", "PS002", "second time"),
        ("nan.yaml", "PS002", "finite"),
        ("nan.json", "PS002", "finite"),
        ("infinite.yaml", "PS002", "finite"),
        ("infinite.json", "PS002", "finite"),
        ("boolean.yaml", "PS002", "received true"),
        ("quoted.yaml", "PS002", "received '1.2'"),
        ("latin.yaml", "PS000", "UTF-8"),
        ("utf16.yaml", "PS000", "UTF-8"),
        ("values.yaml", "PS000", "values"),
        ("values.json", "PS000", "values"),
        ("documents.yaml", "PS000", "at most 100 documents"),
        ("object.yaml", "PS000", "tag"),
        ("include.yaml", "PS000", "tag !include"),
        ("anchors.yaml", "PS000", "anchor"),
        ("maybe.yaml", "PS000", "no bool"),
    ],
)
def test_the_finding_names_the_fault(judged, name, id, says):
    assert any(finding["id"] == id and says in finding["message"] for finding in judged[0][name]), judged[0][name]


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "loop", "secret"])
def test_a_path_that_is_no_file(command, tmp_path, kind):
    path = tmp_path / "privacy.yaml"
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "secret":
            path.write_text(BASE)
            path.chmod(0)
            if os.access(path, os.R_OK):
                pytest.skip("this user may read everything")
    start = time.monotonic()
    code, out, _ = command("validate", path)
    assert time.monotonic() - start < 10, "waits for nobody"
    assert code == 1
    assert "error[PS000]" in out


@pytest.mark.parametrize("format", ["text", "json", "github", "sarif", "junit"])
def test_nothing_steers_the_terminal(command, tmp_path, format):
    steering = '"\\u001b]0;gone\\u0007\\u001b[2J\\u202e\\u2066\\u0000\\u009b31m"'
    path = tmp_path / "a\x1b[31mb\u202e.json"
    path.write_text(
        f'{{"claim": {{"epsilon": {steering}, {steering}: 1}}, "x\x9b": 1,\n"\u202e": 2}}', encoding="utf-8"
    )
    code, out, err = command("validate", path, "--format", format)
    assert code == 1
    shown = (out + err).replace("\n", "")
    assert printable(shown) == shown
    assert "1b" in shown


def test_errors_of_other_commands_do_not_steer_it_either(command, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text('"\\e[2J": 1\n')
    _, out, err = command("account", "--spec", path)
    assert "\x1b" not in out + err
    assert "\\x1b[2J" in err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("epsilon é 漢 😀 ∞", "epsilon é 漢 😀 ∞"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\rb\nc\td", "a\\x0db\\x0ac\\x09d"),
        ("\x9b\u202e\u2028", "\\x9b\\u202e\\u2028"),
        ("\ud800\U000e0001", "\\ud800\\U000e0001"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_reused_anchor_is_a_finding_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specs, findings = PrivacySpec.all_from_text("a: &a 1\nb: &a 2\n")
    assert specs == []
    assert [(finding.line, finding.id) for finding in findings] == [(2, "PS000")]


class TestManyFaults:
    """A thousand unknown fields: a page of text, every one of them for programs."""

    MANY = "".join(f"k{number}: 1\n" for number in range(1000))

    def test_text_stays_short(self, command, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_text(self.MANY)
        code, out, _ = command("validate", path)
        assert code == 1
        assert len(out) < 20_000
        told = out.count("error[")
        total = int(re.search(r"1 spec: (\d+) errors", out)[1])
        assert f"a.yaml: and {total - told} more findings; --format json lists all." in out

    @pytest.mark.parametrize("format", ["json", "sarif", "junit", "github"])
    def test_programs_get_every_one(self, command, tmp_path, format):
        path = tmp_path / "a.yaml"
        path.write_text(self.MANY)
        _, out, _ = command("validate", path, "--format", format)
        assert {int(number) for number in re.findall(r"received 'k(\d+)'", html.unescape(out))} == set(range(1000))

    def test_an_error_is_not_hidden_behind_warnings(self, command, tmp_path):
        path = tmp_path / "a.yaml"
        waiver = "  - {finding: PS050, reason: r, expires: 2999-01-01}\n"
        path.write_text(f"{BASE}waivers:\n{waiver * 60}{waiver.replace('2999', '2001')}")
        code, out, _ = command("validate", path)
        assert code == 1
        assert "error[PS060]" in out
        assert out.count("[PS06") == 30
        assert "and 32 more findings" in out

    def test_an_error_of_the_library_stays_short(self):
        with pytest.raises(SpecError) as caught:
            PrivacySpec.from_text(self.MANY)
        assert len(caught.value.findings) > 1000
        assert len(str(caught.value)) < 20_000
        assert str(caught.value).endswith(f"and {len(caught.value.findings) - 30} more")

    def test_faults_of_other_kinds_are_told_too(self):
        """Beyond the first hundred in fewer words, but each at its line."""
        text = BASE + "waivers:\n" + "".join(f"  - wrong{number}\n" for number in range(300))
        _, findings = PrivacySpec.all_from_text(text)
        first = BASE.count("\n") + 2
        assert [finding.line for finding in findings] == list(range(first, first + 300))
        assert all(repr(f"wrong{number}") in finding.message for number, finding in enumerate(findings))
