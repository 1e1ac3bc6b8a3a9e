// RUN: %opt %s -p bufferise | %filecheck %s

// Local tensors become aligned buffers at the function's entry, constants become globals, and the
// buffer that is carried around is stored to where it is.

func.func @loop(%start: i64, %stop: i64, %y: tensor<?xf64>) -> tensor<?xf64> {
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %table = arith.constant dense<[1.0, 2.0]> : tensor<2xf64>
  %c0 = arith.constant 0 : index
  %c4 = arith.constant 4 : index
  %zero = arith.constant 0.0 : f64
  %done = scf.for %block = %first to %end step %c4 iter_args(%buffer = %y) -> (tensor<?xf64>) {
    %empty = tensor.empty() : tensor<4xf64>
    %filled = linalg.fill ins(%zero : f64) outs(%empty : tensor<4xf64>) -> tensor<4xf64>
    %sum = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d1)>], iterator_types = ["reduction", "parallel"]} ins(%table : tensor<2xf64>) outs(%filled : tensor<4xf64>) {
    ^bb0(%entry: f64, %old: f64):
      %new = arith.addf %old, %entry : f64
      linalg.yield %new : f64
    } -> tensor<4xf64>
    %value = tensor.extract %sum[%c0] : tensor<4xf64>
    %next = tensor.insert %value into %buffer[%block] : tensor<?xf64>
    scf.yield %next : tensor<?xf64>
  }
  func.return %done : tensor<?xf64>
}

// CHECK:       "memref.global"() <{sym_name = "[[TABLE:.*]]", type = memref<2xf64>, initial_value = dense<[1.000000e+00, 2.000000e+00]> : tensor<2xf64>
// CHECK-SAME:    constant
// CHECK-NEXT:  func.func @loop(%{{.*}}: i64, %{{.*}}: i64, %[[Y:.*]]: memref<?xf64>) {
// CHECK-DAG:     %[[GLOBAL:.*]] = memref.get_global @[[TABLE]] : memref<2xf64>
// CHECK-DAG:     %[[LOCAL:.*]] = memref.alloca() {alignment = 64 : i64} : memref<4xf64>
// CHECK:         scf.for %[[BLOCK:.*]] = %{{.*}} to %{{.*}} step %{{.*}} {
// CHECK-NEXT:      linalg.fill ins(%{{.*}} : f64) outs(%[[LOCAL]] : memref<4xf64>)
// CHECK-NEXT:      linalg.generic {{.*}} ins(%[[GLOBAL]] : memref<2xf64>) outs(%[[LOCAL]] : memref<4xf64>) {
// CHECK:           %[[VALUE:.*]] = memref.load %[[LOCAL]][%{{.*}}] : memref<4xf64>
// CHECK-NEXT:      memref.store %[[VALUE]], %[[Y]][%[[BLOCK]]] : memref<?xf64>
// CHECK:         func.return{{$}}
// CHECK-NOT:   tensor.insert
