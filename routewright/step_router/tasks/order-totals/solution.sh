# step
echo customer,cents > totals.csv
# step
awk -F, 'NR > 1 && $4 == "paid" {sum[$2] += $3} END {for (name in sum) print name "," sum[name]}' orders.csv | sort > sums.tmp
# step
(echo customer,cents; cat sums.tmp) > totals.csv; rm sums.tmp
