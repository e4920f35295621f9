"""What was measured, for people: tables, markdown, JSON lines and plots."""
