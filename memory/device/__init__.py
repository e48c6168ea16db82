"""The buffer, its views and tables, and what moves bytes."""
