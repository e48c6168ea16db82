"""The embedded demonstration model: its checkpoint, its tokenizer, and the programs that trained and score it."""
