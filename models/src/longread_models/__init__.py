"""The bundled checkpoints, one folder a model, in DeepSeek's own format. Data only: ``longread`` finds them by name."""
