"""Private names of TRL."""

TESTED = ("1.15", "1.16")
NAMES = {
    "trl.GRPOTrainer._dist": "replaced: what the trainer asks for whole parameters",
    "trl.generation.vllm_generation.VLLMGeneration._dist": "replaced: what a generation with vLLM asks for them",
    "trl.DPOTrainer._precompute_ref_logps": "wrapped: the model is prepared before it stands for its own reference",
}
