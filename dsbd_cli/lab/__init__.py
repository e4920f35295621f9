"""The lab: benchmarks, profiles and their reports. A user who only generates never loads it."""
