"""Tests of kvfuse. Run them from the project's root."""
