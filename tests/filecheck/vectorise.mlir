// RUN: %opt %s -p 'vectorise{tile=2 unroll=2}' | %filecheck %s

// Inside the loop over blocks the last dimension becomes a vector of four cells. A contraction of
// three rows over five columns has two rows in registers at a time, two columns a step.

"memref.global"() <{sym_name = "table", type = memref<3x5xf64>, initial_value = dense<[[2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0, 16.0]]> : tensor<3x5xf64>, sym_visibility = "private", constant, alignment = 64 : i64}> : () -> ()
func.func @loop(%start: i64, %stop: i64, %map: memref<?xi32>, %x: memref<?xf64>) {
  %table = memref.get_global @table : memref<3x5xf64>
  %pack = memref.alloca() {alignment = 64 : i64} : memref<5x4xf64>
  %rows = memref.alloca() {alignment = 64 : i64} : memref<3x4xf64>
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %zero = arith.constant 0.0 : f64
  %c4 = arith.constant 4 : index
  scf.for %block = %first to %end step %c4 {
    linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} outs(%pack : memref<5x4xf64>) {
    ^bb0(%old: f64):
      %slot = linalg.index 0 : index
      %cell = linalg.index 1 : index
      %entity = arith.addi %cell, %block : index
      %c5 = arith.constant 5 : index
      %row = arith.muli %entity, %c5 : index
      %at = arith.addi %row, %slot : index
      %target = memref.load %map[%at] : memref<?xi32>
      %index = arith.index_cast %target : i32 to index
      %value = memref.load %x[%index] : memref<?xf64>
      linalg.yield %value : f64
    }
    linalg.fill ins(%zero : f64) outs(%rows : memref<3x4xf64>)
    linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d2)>], iterator_types = ["parallel", "reduction", "parallel"]} ins(%table, %pack : memref<3x5xf64>, memref<5x4xf64>) outs(%rows : memref<3x4xf64>) {
    ^bb0(%a: f64, %b: f64, %c: f64):
      %product = arith.mulf %a, %b fastmath<contract> : f64
      %sum = arith.addf %c, %product fastmath<contract> : f64
      linalg.yield %sum : f64
    }
  }
  func.return
}

// Numbers stand before everything else, in the order of their first use.
// CHECK:       %[[FIFTH:.*]] = arith.constant 6.000000e+00 : f64
// CHECK:       %[[LAST:.*]] = arith.constant 1.600000e+01 : f64

// A gather: one scalar load a cell, put together into one vector.
// CHECK:       memref.load %{{.*}} : memref<?xi32>
// CHECK:       "vector.from_elements"({{.*}}) : (f64, f64, f64, f64) -> vector<4xf64>
// CHECK:       vector.store %{{.*}}, %[[PACK:.*]][%{{.*}}, %{{.*}}] : memref<5x4xf64>, vector<4xf64>

// The first tile: two accumulators through a loop of steps of two, the fifth column after it.
// CHECK:       %{{.*}}, %{{.*}} = scf.for %[[COLUMN:.*]] = %{{.*}} to %{{.*}} step %{{.*}} iter_args(%{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}) -> (vector<4xf64>, vector<4xf64>) {
// CHECK:         vector.load %[[PACK]][%[[COLUMN]], %{{.*}}] : memref<5x4xf64>, vector<4xf64>
// CHECK:         arith.mulf {{.*}} fastmath<contract> : vector<4xf64>
// CHECK-NEXT:    arith.addf {{.*}} fastmath<contract> : vector<4xf64>
// CHECK:         scf.yield %{{.*}}, %{{.*}} : vector<4xf64>, vector<4xf64>
// CHECK:       vector.broadcast %[[FIFTH]] : f64 to vector<4xf64>
// CHECK:       vector.store {{.*}} : memref<3x4xf64>, vector<4xf64>
// CHECK:       vector.store {{.*}} : memref<3x4xf64>, vector<4xf64>

// The third row alone.
// CHECK:       scf.for {{.*}} -> (vector<4xf64>) {
// CHECK:       vector.broadcast %[[LAST]] : f64 to vector<4xf64>
// CHECK:       vector.store {{.*}} : memref<3x4xf64>, vector<4xf64>
// CHECK-NOT:   linalg
