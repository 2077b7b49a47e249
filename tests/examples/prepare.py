"""What the examples read, made small: pictures of two classes, a corpus, a model with its tokenizer, conversations, a GGUF file."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import stagekit

BUCKET = os.environ["BUCKET"]


def photos(folder: Path, count: int, seed: int) -> None:
    """Reddish and bluish pictures of different sizes: JPEG, PNG, and grey levels with a palette's, as collections have them."""
    chance = random.Random(seed)
    for number in range(count):
        red = number % 2 == 0
        colour = (200, chance.randint(0, 60), 40) if red else (40, chance.randint(0, 60), 200)
        image = Image.new("RGB", (chance.randint(20, 40), chance.randint(20, 40)), colour)
        place = folder / ("red" if red else "blue")
        place.mkdir(parents=True, exist_ok=True)
        if number % 3:
            image.save(place / f"{number:03}.jpg")
        else:
            (image.quantize(4) if number % 6 else image).save(place / f"{number:03}.png")


def model(folder: Path) -> None:
    """A Llama of two layers with random weights, which knows bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def gguf(file: Path) -> None:
    """The head of a GGUF file of version 3, without tensors, and a key that names its architecture."""
    file.parent.mkdir()
    key, value = b"general.architecture", b"llama"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    file.write_bytes(head + struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value)


def main() -> None:
    for part, count in (("train", 48), ("held-out", 10)):
        photos(Path("photos", part), count, count)
        stagekit.shard(f"photos/{part}", f"{BUCKET}/photos/{part}", labels="dir", workers=1)
    corpus = Path("corpus")
    corpus.mkdir()
    for number in range(96):
        (corpus / f"{number:02}.txt").write_text(f"Document {number} of the corpus. " * (1 + number % 4))
    stagekit.shard(corpus, f"{BUCKET}/corpus", source_format="text", workers=1)
    model(Path("llama"))
    stagekit.push("llama", f"{BUCKET}/models/llama")
    Path("chat").mkdir()
    lines = [json.dumps({"prompt": f"What is {n} and {n}?", "answer": f"{2 * n}."}) for n in range(16)]
    Path("chat", "train.jsonl").write_text("\n".join(lines) + "\n")
    stagekit.push("chat", f"{BUCKET}/chat")
    gguf(Path("gguf", "tiny-q4.gguf"))
    stagekit.push("gguf", f"{BUCKET}/gguf/llama")


if __name__ == "__main__":
    main()
