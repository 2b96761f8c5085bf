# step
tr -cs 'A-Za-z' '\n' < text.txt | tr 'A-Z' 'a-z' | grep . | sort | uniq -c > counts.tmp
# step
sort -k1,1nr -k2,2 counts.tmp | head -n 5 | awk '{print $2 "\t" $1}' > top.tsv; rm counts.tmp
