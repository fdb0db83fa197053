"""The engine on tensors without values, streams without threads and tiers without memory: what a step would do."""
