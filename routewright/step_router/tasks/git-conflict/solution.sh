# step
cd repo && git merge feature || git status --short
# step
cd repo && port=$(git show main:settings.txt | grep ^port=) && color=$(git show feature:settings.txt | grep ^color=) && git show main:settings.txt | sed "s/^port=.*/$port/; s/^color=.*/$color/" > settings.txt && git add -A && git commit -q -m "Merge feature"
