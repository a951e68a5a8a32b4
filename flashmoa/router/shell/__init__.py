"""Route chats that read each other's answers over a PD pair: the shell router (Faster-MoA §4.3)."""
