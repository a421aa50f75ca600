"""The model screen: finds, judges, downloads, verifies, configures and deletes models."""
