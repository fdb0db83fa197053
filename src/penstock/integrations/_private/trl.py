"""Private names of TRL."""

TESTED = ("1.15", "1.16")
NAMES = {
    "trl.GRPOTrainer._dist": "replaced: what the trainer asks for whole parameters",
    "trl.SFTTrainer._prepare_dataset": "overridden: ids and labels are made by ours, and cut and packed by TRL's",
    "trl.SFTTrainer._tokenizer": "read: the tokenizer, also of a processor",
    "trl.SFTTrainer._total_train_tokens": "read: how many tokens a step has; written for packed rows that stay rows",
    "trl.generation.vllm_generation.VLLMGeneration._dist": "replaced: what a generation with vLLM asks for them",
    "trl.DPOTrainer._precompute_ref_logps": "wrapped: the model is prepared before it stands for its own reference",
}
