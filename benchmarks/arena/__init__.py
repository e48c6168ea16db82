"""What the arena costs and saves on a device: chats of two turns, shared prefixes, the host tier, moves under load."""
