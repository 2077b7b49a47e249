"""The fine-tuning of lora.py as you may have it today: it knows the directories base, data and out, and nothing of a bucket.

    stagekit pull s3://my-bucket/models/llama base
    stagekit pull s3://my-bucket/chat data
    stagekit run --to s3://my-bucket/runs/llama-chat --watch out -- python lora_plain.py

What the Trainer saves into out goes to the bucket meanwhile. On the next machine the same three lines bring model, data and the newest
checkpoint, and the script finds that in out as it would after any interruption.
"""

import json
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

EPOCHS = int(os.environ.get("EPOCHS", 3))

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
trainer = Trainer(model, args, data_collator=collator, train_dataset=data)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if Path("out").is_dir() else None)
