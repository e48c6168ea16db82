"""Grafana dashboards and alert rules over the metrics table; ``python -m dashboards`` writes the files beside this."""
