"""No secret that can be told by its name, shape or value leaves the machine; everything else stays readable."""

from __future__ import annotations

import pytest

from stagekit.wrapping.redaction import is_secret_name, redacted, redacted_command, secret_values

HF, AWS, GITHUB = "hf_" + "a1B2" * 8, "AKIA" + "ABCDEFGH12345678", "ghp_" + "x9Y8" * 8


@pytest.mark.parametrize(
    "name",
    [
        *("--token", "HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "--password", "passwd", "api-key", "auth_token"),
        *("--wandb-key", "--logger.wandb_key", "AZURE_STORAGE_KEY", "ACCOUNT_KEY", "secret_key"),
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["--max-new-tokens", "max_token", "pad_token", "tokenizer", "--key", "secretary", "author", "keyboard"])
def test_harmless_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--token", "abc", "--lr", "1"], ["train.py", "--token", "[redacted]", "--lr", "1"]),
        (["--token=abc", "x"], ["--token=[redacted]", "x"]),
        (["--wandb-key=abc", "x"], ["--wandb-key=[redacted]", "x"]),
        (["env", "HF_TOKEN=abc", "python"], ["env", "HF_TOKEN=[redacted]", "python"]),
        (["--push-token", "--lr", "1"], ["--push-token", "--lr", "1"]),
        (["--repo", "https://me:pa55@host/x"], ["--repo", "https://[redacted]@host/x"]),
        (["--id", HF, AWS, GITHUB], ["--id", "[redacted]", "[redacted]", "[redacted]"]),
        (
            ["bash", "-c", "HF_TOKEN=abc python t.py --password 'p q' --lr 1"],
            ["bash", "-c", "HF_TOKEN=[redacted] python t.py --password '[redacted]' --lr 1"],
        ),
        (["--header", "Authorization: Bearer abcdefgh12345"], ["--header", "Authorization: Bearer [redacted]"]),
        (["--max-new-tokens", "64"], ["--max-new-tokens", "64"]),
        (["--pad-token", "<pad>"], ["--pad-token", "<pad>"]),
    ],
)
def test_command_lines(words: list[str], expected: list[str]) -> None:
    assert redacted_command(words) == expected


def test_what_the_environment_holds_under_a_secret_name_is_taken_out_wherever_it_stands() -> None:
    secrets = secret_values({"MY_PASSWORD": "correct horse", "HOME": "/root/x", "AN_API_KEY": "short", "B_TOKEN": "tok-123456"})
    assert secrets == ["correct horse", "tok-123456"]
    assert redacted_command(["--note", "say correct horse"], secrets) == ["--note", "say [redacted]"]


def test_a_diff_keeps_everything_but_secrets() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----"
    diff = f"""diff --git a/train.py b/train.py
-wandb.login(key="old")
+api_key = "0123456789abcdef"
+os.environ["WANDB_API_KEY"] = 'fedcba'
+password: hunter22
+url = "s3://user:secret@bucket/x"
+lr = 3e-4
+max_new_tokens = 64
+def f(token: str, api_key=None): return token == other.token
+{key}
+x = "{HF}"
"""
    found = redacted(diff)
    for secret in ("0123456789abcdef", "fedcba", "hunter22", "user:secret", "MIIE", HF):
        assert secret not in found
    for kept in (
        "diff --git a/train.py b/train.py",
        "lr = 3e-4",
        "max_new_tokens = 64",
        "+api_key = ",
        "+def f(token: str, api_key=None): return token == other.token",
    ):
        assert kept in found
