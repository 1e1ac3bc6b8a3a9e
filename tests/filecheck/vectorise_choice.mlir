// RUN: %opt %s -p 'vectorise{tile=4 unroll=4}' | %filecheck %s

// The number of a facet differs from cell to cell: an entry of a short table is chosen between
// constants. Entries that do not depend on the facet are constants.

"memref.global"() <{sym_name = "table", type = memref<3x2xf64>, initial_value = dense<[[2.0, 9.0], [3.0, 9.0], [5.0, 9.0]]> : tensor<3x2xf64>, sym_visibility = "private", constant, alignment = 64 : i64}> : () -> ()
func.func @loop(%start: i64, %stop: i64, %facets: memref<?xi32>) {
  %table = memref.get_global @table : memref<3x2xf64>
  %values = memref.alloca() {alignment = 64 : i64} : memref<2x4xf64>
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %c4 = arith.constant 4 : index
  scf.for %block = %first to %end step %c4 {
    linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} outs(%values : memref<2x4xf64>) {
    ^bb0(%old: f64):
      %point = linalg.index 0 : index
      %cell = linalg.index 1 : index
      %entity = arith.addi %cell, %block : index
      %number = memref.load %facets[%entity] : memref<?xi32>
      %facet = arith.index_cast %number : i32 to index
      %value = memref.load %table[%facet, %point] : memref<3x2xf64>
      linalg.yield %value : f64
    }
  }
  func.return
}

// CHECK-COUNT-4: memref.load %facets
// CHECK-NOT:     memref.load %table
// CHECK:         %[[FACETS:.*]] = "vector.from_elements"({{.*}}) : (i64, i64, i64, i64) -> vector<4xi64>
// CHECK:         %[[FIRST:.*]] = "arith.cmpi"(%[[FACETS]], %{{.*}}) <{predicate = 0 : i64}>
// CHECK:         %[[SOME:.*]] = "arith.select"(%[[FIRST]], %{{.*}}, %{{.*}})
// CHECK:         %[[SECOND:.*]] = "arith.cmpi"(%[[FACETS]], %{{.*}}) <{predicate = 0 : i64}>
// CHECK:         %[[ALL:.*]] = "arith.select"(%[[SECOND]], %{{.*}}, %[[SOME]]) : (vector<4xi1>, vector<4xf64>, vector<4xf64>)
// CHECK-NOT:     "arith.select"
// CHECK:         vector.store %[[ALL]], %values
// CHECK:         vector.store %{{.*}}, %values
