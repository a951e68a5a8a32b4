"""Place prompts over several engines by cached prefix, FLOPs and saturation (MoE-Prefill §7)."""
