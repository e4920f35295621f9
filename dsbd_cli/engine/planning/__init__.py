"""Choices between iterations: layers and drafts from acceptance and timing, rows from memory."""
