"""Fine-tune a language model with LoRA on lines of JSON, on one GPU; the adapter is in the bucket after every epoch.

Once: a model from the Hugging Face Hub, and a file chat/train.jsonl with lines such as {"prompt": "…", "answer": "…"}.

    stagekit cp hf://meta-llama/Llama-3.2-1B s3://my-bucket/models/llama
    stagekit push chat s3://my-bucket/chat

Then here, and the same line again on the next machine:

    python lora.py
"""

import json
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

import stagekit
from stagekit.hooks.transformers import StagekitCallback

BUCKET = os.environ.get("BUCKET", "s3://my-bucket")
MODEL = os.environ.get("MODEL", "llama")
DATA = os.environ.get("DATA", "chat")
EPOCHS = int(os.environ.get("EPOCHS", 3))

stagekit.pull(f"{BUCKET}/models/{MODEL}", "base")
stagekit.pull(f"{BUCKET}/{DATA}", "data")
callback = StagekitCallback(f"{BUCKET}/runs/{MODEL}-{DATA}")

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("base")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with Path("data/train.jsonl").open() as lines:
    rows = [json.loads(line) for line in lines]
data = [tokenizer(f"{row['prompt']}\n{row['answer']}{tokenizer.eos_token}", truncation=True, max_length=2048) for row in rows]

bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.bfloat16 if bf16 else torch.float32)
model.enable_input_require_grads()  # gradient checkpointing below frozen layers needs it
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"))
args = TrainingArguments(
    "out",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=4,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    learning_rate=2e-4,
    lr_scheduler_type="cosine",
    bf16=bf16,
    save_strategy="epoch",
    save_total_limit=1,  # on this disk
    logging_strategy="epoch",
    disable_tqdm=True,  # lines, which a log can keep
    report_to=[],
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, args, data_collator=collator, train_dataset=data, callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.resume_dir())
