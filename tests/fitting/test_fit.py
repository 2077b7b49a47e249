"""What a plan needs: by formulas that are worked out here a second time, for models whose counts are known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import stagekit
from stagekit.cli import main
from stagekit.diagnosis.machine import Gpu
from stagekit.errors import ManifestError, UsageError
from stagekit.fitting import Fit, fit
from stagekit.fitting.model import of_config
from stagekit.store.directory import DirectoryStore

from ..made import make_checkpoint, make_dataset, make_run

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def no_gpu() -> tuple[Gpu, ...]:
    return ()


def config(folder: Path, values: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        (LLAMA_7B, 6_738_415_616),
        (
            {**LLAMA_7B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
            | {"num_key_value_heads": 8},
            68_976_648_192,
        ),
        ({**LLAMA_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}, 8_030_261_248),
        (
            {**LLAMA_7B, "model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8},
            46_702_792_704,
        ),
        ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}, 124_439_808),
        (
            {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
            | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
            494_032_768,
        ),
        (
            {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576}
            | {"vocab_size": 50432, "tie_word_embeddings": False},
            20_554_567_680,
        ),
        ({"text_config": LLAMA_7B, "vision_config": {}}, 6_738_415_616),
    ],
    ids=["llama-2-7b", "llama-2-70b", "llama-3-8b", "mixtral-8x7b", "gpt-2", "qwen-2.5-0.5b", "gpt-neox-20b", "inside-a-larger-one"],
)
def test_a_config_gives_the_count_that_the_model_has(values: dict[str, Any], parameters: int) -> None:
    assert of_config(values, said="x").parameters == parameters


def test_inference_is_weights_and_the_keys_and_values_of_every_token(tmp_path: Path) -> None:
    found = fit(config(tmp_path, LLAMA_7B), "inference", batch=4, seq=4096, gpus=no_gpu)
    weights, cache = found.vram.items[:2]
    assert weights.bytes.low == weights.bytes.high == 2 * 6_738_415_616
    assert cache.bytes.low == cache.bytes.high == 2 * 32 * 4096 * 4 * 4096 * 2
    assert found.vram.total.low == weights.bytes.low + cache.bytes.low + 0.3e9
    assert found.vram.total.high == pytest.approx(1.1 * (1.2 * weights.bytes.low + cache.bytes.low + 1.3e9))
    assert (found.checkpoint, found.upload_s, found.save_interval_s) == (None, None, None)
    assert found.disk.low == 2 * 6_738_415_616


@pytest.mark.parametrize(
    ("precision", "optimizer", "low", "high", "saved"),
    [
        ("bf16", "adamw", 16, 18, 12),
        ("fp32", "adamw", 16, 16, 12),
        ("pure-bf16", "adamw", 8, 8, 6),
        ("bf16", "adamw8bit", 10, 12.1, 6),
        ("fp16", "sgd", 8, 10, 4),
    ],
)
def test_full_training_is_so_many_bytes_a_parameter(precision: str, optimizer: str, low: float, high: float, saved: float) -> None:
    found = fit("7B", "full", precision=precision, optimizer=optimizer, gpus=no_gpu)
    states = [one.bytes for one in found.vram.items[:3]]
    assert sum(one.low for one in states) == pytest.approx(low * 7e9)
    assert sum(one.high for one in states) == pytest.approx(high * 7e9)
    assert found.checkpoint is not None
    assert found.checkpoint.bytes.low == pytest.approx(saved * 7e9)
    assert found.disk.low == pytest.approx(2 * saved * 7e9 + 14e9)


def test_adapters_and_activations_of_a_model_whose_shape_is_known(tmp_path: Path) -> None:
    where = config(tmp_path, LLAMA_7B)
    lines = {one.name: one.bytes for one in fit(where, "lora", batch=4, seq=512, gpus=no_gpu).vram.lines}
    two, all_linear = 32 * 16 * 4 * 4096, 32 * 16 * (4 * 8192 + 3 * (4096 + 11008))
    assert (lines["adapters"].low, lines["adapters"].high) == (16 * two, 16 * all_linear)
    assert lines["activations"].low == lines["activations"].high == 32 * 2 * 4 * 512 * 4096
    assert (lines["one layer again"].low, lines["one layer again"].high) == (34 * 2048 * 4096, 34 * 2048 * 4096 + 5 * 32 * 512 * 2048)
    assert (lines["logits"].low, lines["logits"].high) == (2048 * 32000 * 6, 2048 * 32000 * 12)
    kept = {one.name: one.bytes for one in fit(where, "lora", batch=4, seq=512, checkpointing=False, gpus=no_gpu).vram.lines}
    assert kept["activations"].high == 32 * lines["one layer again"].high
    doubled = {one.name: one.bytes for one in fit(where, "lora", precision="fp32", batch=4, seq=512, gpus=no_gpu).vram.lines}
    assert doubled["activations"].low == 2 * lines["activations"].low
    packed = fit(where, "qlora", gpus=no_gpu).vram.items[0].bytes
    assert packed.low == pytest.approx(6_738_415_616 * 4.127 / 8)
    assert packed.high == pytest.approx((6_738_415_616 - 2 * 32000 * 4096) * 4.5 / 8 + 2 * 2 * 32000 * 4096)


def test_the_published_figures_stand_beside_and_lie_within_or_near() -> None:
    """A rule of thumb for inference counts weights alone, so it is no more than our high end; our low end is not far above it."""
    for plan, precision, figures in (
        ("inference", "fp16", {"7B": 14, "13B": 26, "34B": 68, "70B": 140}),
        ("inference", "int4", {"7B": 5, "13B": 9, "34B": 20, "70B": 40}),
        ("lora", "bf16", {"7B": 16, "13B": 28}),
        ("qlora", "int4", {"7B": 16, "13B": 28}),
        ("full", "pure-bf16", {"7B": 56, "13B": 104}),
        ("full", "bf16", {"7B": 56, "13B": 104}),
    ):
        for size, gigabytes in figures.items():
            found = fit(size, plan, precision=precision, gpus=no_gpu)  # type: ignore[arg-type]
            assert found.published is not None
            assert found.published.gigabytes == gigabytes
            if (plan, precision) == ("full", "bf16"):
                assert found.vram.total.low > 2 * gigabytes * 1e9, "the published one is a floor"
                assert f"about 16, {16 * int(size[:-1])} GB for {size}" in found.published.text
            elif plan != "qlora":
                assert found.vram.total.low < 1.2 * gigabytes * 1e9
                assert found.vram.total.high > gigabytes * 1e9
    larger = fit("70B", "lora", gpus=no_gpu).published
    assert larger is not None
    assert (larger.gigabytes, larger.text) == (None, "70B, LoRA or QLoRA fine-tuning: several GPUs")
    assert fit("3B", gpus=no_gpu).published is None
    assert fit("7B", "inference", precision="int8", gpus=no_gpu).published is None


def llama(folder: Path, *, kind: Any = np.float16, head: bool = True) -> None:
    tensors = {"model.embed_tokens.weight": np.zeros((500, 256), kind), "model.norm.weight": np.zeros(256, kind)}
    if head:
        tensors["lm_head.weight"] = np.zeros((500, 256), kind)
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.{name}_proj.weight": np.zeros((width, 256), kind)
            for name, width in (("q", 256), ("k", 128), ("v", 128), ("o", 256))
        }
        tensors |= {f"{prefix}.mlp.{name}_proj.weight": np.zeros((700, 256), kind) for name in ("gate", "up")}
        tensors[f"{prefix}.mlp.down_proj.weight"] = np.zeros((256, 700), kind)
    names = sorted(tensors)
    folder.mkdir(exist_ok=True)
    save_file({name: tensors[name] for name in names[:9]}, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file({name: tensors[name] for name in names[9:]}, folder / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("index", [True, False])
def test_a_model_that_lacks_a_file_is_not_counted(tmp_path: Path, index: bool) -> None:
    name = "model.safetensors" if index else "model-00002-of-00003.safetensors"
    save_file({"w": np.zeros((10, 10), np.float32)}, tmp_path / name)
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name, "v": "other.safetensors"}}))
    with pytest.raises(UsageError, match=f"lacks {'other' if index else 'model-00001-of-00003'}.safetensors, so that it would be counted"):
        fit(tmp_path, gpus=no_gpu)


def test_safetensors_are_counted_by_their_headers_alone(tmp_path: Path) -> None:
    llama(tmp_path / "plain")
    found = fit(tmp_path / "plain", "inference", gpus=no_gpu).model
    count = 2 * 500 * 256 + 256 + 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 700 * 256)
    assert (found.parameters, found.stored_bytes, found.assumed) == (count, 2 * count, False)
    shape = found.frugal
    assert (shape.layers, shape.hidden, shape.kv_width, shape.mlp, shape.vocabulary, shape.tied) == (3, 256, 128, 700, 500, False)
    llama(tmp_path / "packed", kind=np.uint8)
    with pytest.raises(UsageError, match=r"packed is quantized, .* put its config.json beside it, or give a parameter count"):
        fit(tmp_path / "packed", gpus=no_gpu)
    config(tmp_path / "packed", LLAMA_7B)
    packed = fit(tmp_path / "packed", gpus=no_gpu).model
    assert (packed.parameters, packed.stored_bytes) == (6_738_415_616, count)
    save_file({"conv": np.zeros((1000, 2000), np.float32)}, tmp_path / "strange.safetensors")
    strange = fit(tmp_path / "strange.safetensors", gpus=no_gpu).model
    assert (strange.parameters, strange.stored_bytes, strange.assumed) == (2_000_000, 8_000_000, True)
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "strange.safetensors").read_bytes()[:30])
    with pytest.raises(
        UsageError, match=r"the header of .*torn\.safetensors cannot be read, so it is no safetensors file \(.*fetch it again"
    ):
        fit(tmp_path / "torn.safetensors", gpus=no_gpu)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({**LLAMA_7B, "kv_lora_rank": 512}, "has latent attention, which these formulas do not cover; give its parameter count"),
        ({**LLAMA_7B, "is_encoder_decoder": True}, "has an encoder and a decoder"),
        ({"hidden_size": 64}, "does not say num_attention_heads, so it is no transformer's config.json"),
        ({**LLAMA_7B, "hidden_size": -4}, r"says hidden_size: -4, which is no positive whole number; mend it there, or give a parameter"),
        ({**LLAMA_7B, "hidden_size": "a"}, r"says hidden_size: 'a', which is no positive whole number"),
        ({**LLAMA_7B, "num_key_value_heads": [1] * 99}, r"says num_key_value_heads: \[1, 1, .*\.\.\.\], which is no positive"),
        ([1], r"config\.json is no JSON object"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused(tmp_path: Path, values: object, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        fit(config(tmp_path, values), gpus=no_gpu)


def test_a_config_that_is_none_ends_as_one_of_another_kind_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = tmp_path / "config.json"
    torn.write_text('{"hidden_size": 64')
    assert main(["fit", str(torn), "--gpu", "24GB"]) == 2
    assert f"model: {torn} cannot be read as a model's config.json (Expecting" in capsys.readouterr().err
    assert main(["fit", config(tmp_path / "bert", {**LLAMA_7B, "num_local_experts": 0}), "--gpu", "24GB"]) == 0
    torn.write_text("[" * 200_000)
    assert main(["fit", str(torn), "--gpu", "24GB"]) == 2
    assert f"model: {torn} cannot be read as a model's config.json (" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{"moe_num_experts": 64}, {"ffn_config": {"ffn_hidden_size": 10752}}, {"mamba_d_state": 16}])
def test_what_would_make_a_model_look_smaller_than_it_is_is_refused(tmp_path: Path, more: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=rf"says {next(iter(more))}, which these formulas do not cover; give its parameter count"):
        fit(config(tmp_path, {**LLAMA_7B, **more}), gpus=no_gpu)
    fit(config(tmp_path / "plain", {**LLAMA_7B, "attn_config": {"attn_type": "multihead_attention"}}), gpus=no_gpu)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model": "8x7B"}, "model: 8x7B names the experts of a mixture"),
        ({"model": "7"}, "model: '7' is 7 parameters"),
        ({"model": ""}, "model: it is empty; give a parameter count, such as 7B, or a config.json"),
        (
            {"model": "meta-llama/Llama-3.1-8B-Instruct"},
            "no file or directory here; names of the Hugging Face Hub are not looked up: give the count, such as 8B, or "
            "stagekit cp hf://meta-llama/Llama-3.1-8B-Instruct/config.json model/, then stagekit fit model",
        ),
        ({"model": "hf://org/name"}, "such as 8B, or stagekit cp hf://org/name/config.json model/"),
        (
            {"model": "s3://b/m/"},
            "bring its config.json, which is enough: stagekit cp s3://b/m/config.json model/, then stagekit fit model",
        ),
        ({"model": "."}, "holds neither config.json nor a safetensors file"),
        ({"plan": "serve"}, "plan: 'serve' is none of inference, lora, qlora, full"),
        ({"precision": "int4"}, "precision: lora has bf16, fp16, fp32, int8, and not int4; for a base model in 4 bits give the plan qlora"),
        ({"optimizer": "sophia"}, "optimizer: 'sophia' is none of adamw"),
        ({"batch": 0}, "batch: 0 is below 1"),
        ({"gpu": "large"}, "gpu: 'large' is not a size"),
        ({"gpu": "0x24GB"}, "gpu: '0x24GB' is 0 GPUs"),
        ({"gpu": "16"}, "gpu: '16' has no unit and would be bytes; write 16GB or 16MB (or 16B)"),
        ({"gpu": "8x80"}, "gpu: '80' has no unit"),
        ({"gpu": "16384"}, "gpu: '16384' is 16.4 kB; a server's has at least 1 GB, such as gpu=24GB"),
        ({"gpu": "24MB"}, "gpu: '24MB' is 24.0 MB; a server's has at least 1 GB"),
        ({"gpu": "24GB", "ram": "64kB"}, "ram: '64kB' is 64.0 kB; a server's has at least 1 GB"),
        ({"gpu": "24GB", "disk": "500"}, "disk: '500' has no unit"),
        ({"rate": "100"}, "rate: '100' has no unit and would be bytes; write 100GB/s or 100MB/s (or 100B/s)"),
        ({"rate": "0MB/s"}, "rate: 0MB/s is not above 0"),
        ({"rate": "1MB/s", "run": "x"}, "rate, run: give one of them"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        fit(**{"model": "7B", "gpus": no_gpu, **settings})
    assert complaint in str(refused.value)


AMPERE, TURING = Gpu("NVIDIA A10", (8, 6), 24 << 30), Gpu("Tesla T4", (7, 5), 16 << 30)


def judged(*gpus: Gpu, plan: str = "lora", **settings: Any) -> Fit:
    return fit("7B", plan, gpus=lambda: gpus, **{"ram": "1TB", "disk": "1TB", **settings})  # type: ignore[arg-type]


def test_a_server_is_judged_on_the_high_end() -> None:
    high = round(judged(AMPERE).vram.total.high) + 1
    assert judged(AMPERE).verdict == "fits"
    assert judged(Gpu("x", (8, 0), high)).verdict == "fits"
    narrow = judged(Gpu("x", (8, 0), high - 2))
    assert narrow.verdict == "does not fit"
    assert "may fit into 23.6 GB, and may not" in narrow.lines[-1]
    assert "15.7 to 23.6 GB do not fit into 8.00 GB" in judged(Gpu("x", (8, 0), 8 * 10**9)).lines[-1]
    assert judged().verdict == "cannot tell"
    assert judged(Gpu("x", None, None)).verdict == "cannot tell"
    assert judged().lines[-1] == "CANNOT TELL: GPU: none was found here and none was named"


def test_several_gpus_share_what_one_cannot_hold() -> None:
    one = fit("7B", "full", gpu="80GB")
    assert one.verdict == "does not fit"
    assert one.lines[-3].endswith("do not fit into 80.0 GB; take one GPU of 180 GB, or 2 of 80.0 GB with FSDP or ZeRO 3")
    assert str(fit("70B", "full", gpu="80GB").facts[0].advice).endswith(" of 80.0 GB with FSDP or ZeRO 3")
    huge = fit("100000B", gpu="8x80GB")
    assert huge.facts[0].advice == (
        "no number of 80.0 GB is enough, as what each computes of its own batch does not fit: take larger GPUs, a smaller model or batch"
    )
    one_line = next(line for line in huge.lines if line.startswith("one GPU"))
    assert "none is enough, as they have up to 180 GB, judged on 221 TB; no number of 80.0 GB is enough" in one_line
    many = str(fit("100000B", "inference", gpu="8x80GB").facts[0].advice)
    assert many.startswith("1,024 of 80.0 GB are not enough to share it: take larger GPUs")
    two = fit("7B", "full", gpu="2x80GB")
    assert two.verdict == "fits"
    assert two.vram.on_each_of(2).high < 80e9 < two.vram.total.high
    assert fit("7B", "full", gpu="8x8GB").verdict == "does not fit"


def test_bf16_wants_ampere_and_a_disk_wants_room() -> None:
    old = judged(TURING, plan="lora", seq=128)
    assert old.verdict == "does not fit"
    assert "Tesla T4 has no bf16 units; they come with Ampere" in old.lines[-1]
    assert [fact.state for fact in judged(AMPERE, precision="fp16").facts] == ["ok", "ok", "ok"]
    assert [(fact.name, fact.state) for fact in fit("7B", gpu="24GB").facts] == [("GPU", "ok"), ("bf16", "note")]
    assert judged(AMPERE, ram="8GB").verdict == "fits"
    assert [fact.state for fact in judged(AMPERE, ram="8GB").facts] == ["ok", "ok", "note", "ok"]
    full = judged(AMPERE, disk="10GB")
    assert full.verdict == "does not fit"
    assert full.lines[-1] == "NO: disk: 14.2 to 15.2 GB of 10.0 GB"


def test_a_data_set_and_a_run_add_what_they_know(tmp_path: Path) -> None:
    manifest = make_dataset(DirectoryStore(str(tmp_path / "digits")))
    run = DirectoryStore(str(tmp_path / "run"))
    make_run(run)
    name = make_checkpoint(run, 100, {"model.pt": b"m" * 1000})
    saved_s = json.loads((tmp_path / "run" / name.manifest_key).read_text())["saved_s"]
    os.utime(tmp_path / "run" / name.manifest_key, (saved_s + 10, saved_s + 10))
    messages: list[str] = []
    found = fit(
        "7B", data=str(tmp_path / "digits"), run=str(tmp_path / "run"), gpu="24GB", on_event=lambda event: messages.append(str(event))
    )
    assert found.data is not None
    assert (found.data.samples, found.data.bytes) == (24, manifest.bytes)
    assert {one.name: one.bytes.high for one in found.disk_items}["data"] == pytest.approx(1.05 * manifest.bytes)
    assert [one.name for one in found.ram_items] == ["as much as VRAM", "streaming"]
    assert found.rate is not None
    assert found.rate.bytes_per_s == pytest.approx(100, rel=0.01)
    assert found.checkpoint is not None
    assert found.upload_s is not None
    assert found.upload_s.high == pytest.approx(found.checkpoint.bytes.high / 100, rel=0.01)
    assert found.save_interval_s is not None
    assert 0 <= found.save_interval_s - found.upload_s.high < 60
    assert messages == []
    with pytest.raises(UsageError, match="is a run, and no data set"):
        fit("7B", data=str(tmp_path / "run"), gpus=no_gpu)
    with pytest.raises(UsageError, match="is a dataset, and no run"):
        fit("7B", run=str(tmp_path / "digits"), gpus=no_gpu)
    with pytest.raises(ManifestError, match="neither a data set nor a run"):
        fit("7B", data=str(tmp_path), gpus=no_gpu)
    os.utime(tmp_path / "run" / name.manifest_key, (saved_s - 10, saved_s - 10))  # two clocks that disagree
    unknown = fit("7B", run=str(tmp_path / "run"), gpu="24GB", on_event=lambda event: messages.append(str(event)))
    assert (unknown.rate, unknown.upload_s) == (None, None)
    assert "does not tell how fast" in messages[0]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the driver's program on this machine; it tells what its file says."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/gpus\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "gpus"


def test_the_command_says_it_with_its_exit_code(smi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smi.write_text("NVIDIA A100-SXM4-80GB, 8.0, 81920, 550.54\n")
    assert main(["fit", "1B", "--plan", "qlora", "--ram", "1TB", "--disk", "1TB", "--rate", "100MB/s"]) == 0
    text = capsys.readouterr().out
    for words in ("[Dettmers et al., 2023 (QLoRA)", "save       no more often than every 1 min", "one is enough", "YES: it fits"):
        assert words in text
    assert main(["fit", "70B", "--plan", "full", "--ram", "1TB", "--disk", "1TB", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["event"], told["verdict"], told["published_gb"]) == ("fit", "does not fit", None)
    python = stagekit.fit("70B", "full", ram="1TB", disk="1TB")
    assert told["vram"] == json.loads(json.dumps(python.record))["vram"]
    assert all(line["source"] and line["arithmetic"] for line in told["vram"]["items"])
    assert sum(line["high_bytes"] for line in told["vram"]["items"]) == pytest.approx(told["vram"]["high_bytes"])
    smi.write_text("NVIDIA H100, 9.0, [N/A], 550.54\n")
    assert main(["fit", "7B"]) == 4
    assert "NVIDIA H100 does not tell its memory" in capsys.readouterr().out
    assert main(["fit", "7B", "--gpu", "much"]) == 2
    assert "gpu: 'much' is not a size" in capsys.readouterr().err
