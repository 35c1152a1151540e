"""What all verbs share: state, locks, open files, and the two sides of a change."""
