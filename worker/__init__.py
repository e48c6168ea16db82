"""One GPU: token ids in, token ids out."""
