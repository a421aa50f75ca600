"""One file per architecture, named as config.json's model_type; each has build(weights, config, context)."""
