"""Private names of Lightning."""

TESTED = ("2.6",)
NAMES = {
    "lightning.pytorch.Trainer._accelerator_connector": "its use_distributed_sampler: one rank keeps its loaders",
    "lightning.pytorch.strategies.DDPStrategy._layer_sync": "sync_batchnorm is applied before the module is prepared",
    "lightning.pytorch.strategies.DDPStrategy._lightning_module": "an empty module is not moved to the cpu at the end",
}
