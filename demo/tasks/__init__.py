"""Generated dialogues that teach and score the formats the demonstration model is meant to follow."""
