# step
cd repo && git log --oneline
# step
cd repo && git revert --no-edit "$(git log --format=%H --grep='^Tune the limits$' -n 1)"
