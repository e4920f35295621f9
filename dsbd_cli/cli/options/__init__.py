"""Options: how they are declared, where their values come from, and what they become."""
