"""An inference server's first minute: the model from its directory, by its Hub name without a network, and with the adapter on it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

nvme = Path(os.environ["NVME"])
tokenizer = AutoTokenizer.from_pretrained(nvme / "llama")
tokens = tokenizer("What is 2 and 2?\n", return_tensors="pt")["input_ids"]
with torch.no_grad():
    plain = AutoModelForCausalLM.from_pretrained(nvme / "llama")(tokens).logits
    named = AutoModelForCausalLM.from_pretrained("tiny/llama", cache_dir=nvme / "hub")(tokens).logits
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(nvme / "llama"), nvme / "llama-adapter")(tokens).logits
assert torch.equal(plain, named)
assert not torch.equal(plain, tuned)
