"""Failure drills: a service on real Ray, clients that judge every answer, and the faults that befall it."""
