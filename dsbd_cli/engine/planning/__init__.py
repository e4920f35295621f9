"""Choices between iterations: depth and width from acceptance and timing, rows from memory."""
