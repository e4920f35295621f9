"""What the machine says of itself: energy, memory, versions. Never an estimate."""
