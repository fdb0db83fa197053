"""Private names of transformers."""

_TRAINER = "transformers.Trainer"
_MODEL = "transformers.PreTrainedModel"

TESTED = ("5.22", "5.23")
NAMES = {
    f"{_TRAINER}._build_accelerator_args": "overridden: what the class would make an accelerator with",
    f"{_TRAINER}._finalize_training": "overridden: train() ends once the last checkpoint is whole",
    f"{_TRAINER}._get_output_dir": "called: names the folder of a checkpoint before it is written",
    f"{_TRAINER}._issue_warnings_after_load": "called: names that a checkpoint lacks are told as Trainer tells them",
    f"{_TRAINER}._load_best_model": "overridden: the best model is read sharded",
    f"{_TRAINER}._load_from_checkpoint": "overridden: weights are read sharded",
    f"{_TRAINER}._load_optimizer_and_scheduler": "overridden: the state is ours, at any number of ranks",
    f"{_TRAINER}._move_model_to_device": "overridden: the placement says where a model lies",
    f"{_TRAINER}._save": "called: writes weights that were gathered part by part",
    f"{_TRAINER}._save_checkpoint": "overridden: the state is written beside training, weights if asked for",
    f"{_TRAINER}._save_optimizer_and_scheduler": "overridden: the state is saved sharded",
    f"{_TRAINER}._train_batch_size": "read: rows of a micro-batch, after auto_find_batch_size has made it smaller",
    f"{_TRAINER}._validate_args": "overridden: the model and the optimizers that were given are checked",
    f"{_TRAINER}._wrap_model": "overridden: no DDP around the model",
    "transformers.TrainingArguments._n_gpu": "written: one process has one device",
    f"{_MODEL}._expand_parallel_plan": "since 5.23: a plan of tensor parallelism by parameters",
    f"{_MODEL}._hf_peft_config_loaded": "a model with adapters in it is not written tensor by tensor",
    f"{_MODEL}._init_weights": "first values of a model on the meta device",
    f"{_MODEL}._keys_to_ignore_on_save": "names that save_pretrained leaves out",
    f"{_MODEL}._supports_attention_backend": "True if attention is a registered function, so that ours is called",
    "transformers.PretrainedConfig._attn_implementation": "the registered function that attention calls",
}
