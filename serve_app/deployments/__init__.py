"""The Ray deployments and every unstable Ray call."""
