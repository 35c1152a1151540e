"""Tests on a real mount, served by a process of its own."""
