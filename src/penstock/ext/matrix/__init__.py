"""Rules over whole parameters: of Muon, Adafactor, and of classes that one is registered for."""
