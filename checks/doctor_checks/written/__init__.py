"""Rules over launch files: what is written there and contradicts itself, by the ids of the checks that would find
it."""
