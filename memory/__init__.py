"""One arena: pages of every kind, decided in ``ledger`` and carried out in ``device``."""
