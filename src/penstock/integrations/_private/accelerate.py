"""Private names of accelerate."""

TESTED = ("1.14", "1.15")
NAMES = {
    "accelerate.Accelerator._models": "has the compiled model of a prepared one; state is saved without them",
    "accelerate.Accelerator._optimizers": "the same for optimizers, which schedulers look for",
    "accelerate.Accelerator._schedulers": "those of an optimizer that is given back go with it",
    "accelerate.Accelerator._save_model_state_pre_hook": "save_state calls ours in place of gathering each state dict",
    "accelerate.Accelerator._load_model_state_pre_hook": "load_state calls ours in place of loading each state dict",
    "accelerate.accelerator._is_accelerate_prepared": "left on a model, it keeps another prepare from doing anything",
    "accelerate.optimizer.AcceleratedOptimizer._is_overflow": "what schedulers read after a step that was skipped",
    "accelerate.hooks._hf_hook": "tells a model that is dispatched or offloaded, which is refused",
    "accelerate.utils.other._orig_mod": "the module that torch.compile, or a compilation by regions, has wrapped",
}
