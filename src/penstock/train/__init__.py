"""`penstock train`: TRL's SFTTrainer on Penstock, from a command line or a file."""
