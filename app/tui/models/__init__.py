"""The model screen: finds, inspects, downloads, verifies, configures and deletes models."""
