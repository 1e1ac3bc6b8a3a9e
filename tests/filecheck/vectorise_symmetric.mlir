// RUN: %opt %s -p 'vectorise{tile=8 unroll=8}' | %filecheck %s

// The table is the same upside down and back to front. So four sums and four differences of columns
// are multiplied by 16 numbers each, and the results added and subtracted: 32 products instead of 64.

"memref.global"() <{sym_name = "table", type = memref<8x8xf64>, initial_value = dense<[[1.0, 2.0, 5.0, 10.0, 17.0, 26.0, 37.0, 50.0], [65.0, 82.0, 101.0, 122.0, 145.0, 170.0, 197.0, 226.0], [257.0, 290.0, 325.0, 362.0, 401.0, 442.0, 485.0, 530.0], [577.0, 626.0, 677.0, 730.0, 785.0, 842.0, 901.0, 962.0], [962.0, 901.0, 842.0, 785.0, 730.0, 677.0, 626.0, 577.0], [530.0, 485.0, 442.0, 401.0, 362.0, 325.0, 290.0, 257.0], [226.0, 197.0, 170.0, 145.0, 122.0, 101.0, 82.0, 65.0], [50.0, 37.0, 26.0, 17.0, 10.0, 5.0, 2.0, 1.0]]> : tensor<8x8xf64>, sym_visibility = "private", constant, alignment = 64 : i64}> : () -> ()
func.func @loop(%start: i64, %stop: i64, %x: memref<?xf64>) {
  %table = memref.get_global @table : memref<8x8xf64>
  %pack = memref.alloca() {alignment = 64 : i64} : memref<8x8xf64>
  %rows = memref.alloca() {alignment = 64 : i64} : memref<8x8xf64>
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %zero = arith.constant 0.0 : f64
  %c8 = arith.constant 8 : index
  scf.for %block = %first to %end step %c8 {
    linalg.fill ins(%zero : f64) outs(%rows : memref<8x8xf64>)
    linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d2)>], iterator_types = ["parallel", "reduction", "parallel"]} ins(%table, %pack : memref<8x8xf64>, memref<8x8xf64>) outs(%rows : memref<8x8xf64>) {
    ^bb0(%a: f64, %b: f64, %c: f64):
      %product = arith.mulf %a, %b fastmath<contract> : f64
      %sum = arith.addf %c, %product fastmath<contract> : f64
      linalg.yield %sum : f64
    }
  }
  func.return
}

// CHECK-COUNT-8:  vector.load %pack
// CHECK:          %[[SUM:.*]] = arith.addf %{{.*}} fastmath<contract> : vector<8xf64>
// CHECK-NEXT:     %[[DIFFERENCE:.*]] = arith.subf %{{.*}} fastmath<contract> : vector<8xf64>
// CHECK:          arith.mulf %[[SUM]]
// CHECK-COUNT-15: arith.mulf
// CHECK:          arith.mulf %[[DIFFERENCE]]
// CHECK-COUNT-15: arith.mulf
// CHECK-NOT:      arith.mulf
// CHECK-COUNT-8:  vector.store %{{.*}}, %rows
// CHECK-NOT:      scf.for
