"""LoRA of Megatron-Bridge on planned rows, against the peft package."""
